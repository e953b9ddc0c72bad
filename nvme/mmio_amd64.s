#include "textflag.h"

// func LoadRegister(p *uint32) uint32
TEXT ·LoadRegister(SB), NOSPLIT, $0-12
	MOVQ p+0(FP), AX
	MOVL (AX), BX
	MOVL BX, ret+8(FP)
	RET

// Stores are seen in order: write-back memory first, then the uncached register.
// func StoreRegister(p *uint32, v uint32)
TEXT ·StoreRegister(SB), NOSPLIT, $0-12
	MOVQ p+0(FP), AX
	MOVL v+8(FP), BX
	MOVL BX, (AX)
	RET
