#include "textflag.h"

// Registers of both: DI acc, SI payload, CX blocks left, DX keys.
// The products are gathered in one set of registers and the words themselves in another, whose neighbouring lanes are
// exchanged once, at the end of the block, rather than for each word.

// One stripe of 64 bytes: lanes 0-3 in Y0 and Y2, lanes 4-7 in Y1 and Y3.
#define STRIPE2(at) \
	VMOVDQU  at(SI), Y4            \
	VMOVDQU  (at+32)(SI), Y5       \
	VPXOR    at(DX), Y4, Y6        \
	VPXOR    (at+32)(DX), Y5, Y7   \
	VPSRLQ   $32, Y6, Y8           \
	VPSRLQ   $32, Y7, Y9           \
	VPMULUDQ Y6, Y8, Y8            \
	VPMULUDQ Y7, Y9, Y9            \
	VPADDQ   Y4, Y2, Y2            \
	VPADDQ   Y5, Y3, Y3            \
	VPADDQ   Y8, Y0, Y0            \
	VPADDQ   Y9, Y1, Y1

// func lanesAVX2(acc *uint64, p *byte, blocks int, keys *uint64)
TEXT ·lanesAVX2(SB), NOSPLIT, $0-32
	MOVQ acc+0(FP), DI
	MOVQ p+8(FP), SI
	MOVQ blocks+16(FP), CX
	MOVQ keys+24(FP), DX

block2:
	VPXOR Y0, Y0, Y0
	VPXOR Y1, Y1, Y1
	VPXOR Y2, Y2, Y2
	VPXOR Y3, Y3, Y3
	STRIPE2(0)
	STRIPE2(64)
	STRIPE2(128)
	STRIPE2(192)
	STRIPE2(256)
	STRIPE2(320)
	STRIPE2(384)
	STRIPE2(448)
	STRIPE2(512)
	STRIPE2(576)
	STRIPE2(640)
	STRIPE2(704)
	STRIPE2(768)
	STRIPE2(832)
	STRIPE2(896)
	STRIPE2(960)
	VPSHUFD $0x4e, Y2, Y2          // lane l to lane l ^ 1
	VPSHUFD $0x4e, Y3, Y3
	VPADDQ  Y2, Y0, Y0
	VPADDQ  Y3, Y1, Y1
	VMOVDQU Y0, (DI)
	VMOVDQU Y1, 32(DI)
	ADDQ    $1024, SI
	ADDQ    $64, DI
	DECQ    CX
	JNZ     block2
	VZEROUPPER
	RET

// One stripe of 64 bytes: all lanes in the products p and the words w, of which there are two sets to halve the chains.
#define STRIPE5(at, p, w) \
	VMOVDQU64 at(SI), Z4     \
	VPXORQ    at(DX), Z4, Z5 \
	VPSRLQ    $32, Z5, Z6    \
	VPMULUDQ  Z5, Z6, Z6     \
	VPADDQ    Z4, w, w       \
	VPADDQ    Z6, p, p

// func lanesAVX512(acc *uint64, p *byte, blocks int, keys *uint64)
TEXT ·lanesAVX512(SB), NOSPLIT, $0-32
	MOVQ acc+0(FP), DI
	MOVQ p+8(FP), SI
	MOVQ blocks+16(FP), CX
	MOVQ keys+24(FP), DX

block5:
	VPXORQ Z0, Z0, Z0
	VPXORQ Z1, Z1, Z1
	VPXORQ Z2, Z2, Z2
	VPXORQ Z3, Z3, Z3
	STRIPE5(0, Z0, Z2)
	STRIPE5(64, Z1, Z3)
	STRIPE5(128, Z0, Z2)
	STRIPE5(192, Z1, Z3)
	STRIPE5(256, Z0, Z2)
	STRIPE5(320, Z1, Z3)
	STRIPE5(384, Z0, Z2)
	STRIPE5(448, Z1, Z3)
	STRIPE5(512, Z0, Z2)
	STRIPE5(576, Z1, Z3)
	STRIPE5(640, Z0, Z2)
	STRIPE5(704, Z1, Z3)
	STRIPE5(768, Z0, Z2)
	STRIPE5(832, Z1, Z3)
	STRIPE5(896, Z0, Z2)
	STRIPE5(960, Z1, Z3)
	VPADDQ    Z1, Z0, Z0
	VPADDQ    Z3, Z2, Z2
	VPSHUFD   $0x4e, Z2, Z2        // lane l to lane l ^ 1
	VPADDQ    Z2, Z0, Z0
	VMOVDQU64 Z0, (DI)
	ADDQ      $1024, SI
	ADDQ      $64, DI
	DECQ      CX
	JNZ       block5
	VZEROUPPER
	RET
