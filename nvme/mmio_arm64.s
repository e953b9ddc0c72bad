#include "textflag.h"

// DMB options: outer shareable, where devices are; loads before, or stores before and after.
#define OSHLD 1
#define OSHST 2

// func LoadRegister(p *uint32) uint32
TEXT ·LoadRegister(SB), NOSPLIT, $0-12
	MOVD p+0(FP), R0
	MOVWU (R0), R1
	DMB $OSHLD
	MOVW R1, ret+8(FP)
	RET

// func StoreRegister(p *uint32, v uint32)
TEXT ·StoreRegister(SB), NOSPLIT, $0-12
	MOVD p+0(FP), R0
	MOVWU v+8(FP), R1
	DMB $OSHST
	MOVW R1, (R0)
	RET
