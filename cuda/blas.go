package cuda

import (
	"fmt"
	"unsafe"
)

// BLAS is cuBLAS, for what transfers are measured beside. It belongs to the context that was bound when it was opened.
type BLAS struct {
	handle    uintptr
	destroy   func(handle uintptr) int32
	setStream func(handle, stream uintptr) int32
	gemm      func(handle uintptr, transA, transB, m, n, k int32, alpha unsafe.Pointer, a uint64, typeA, lda int32,
		b uint64, typeB, ldb int32, beta unsafe.Pointer, c uint64, typeC, ldc, compute, algorithm int32) int32
}

// OpenBLAS loads cuBLAS 13. The error is an ErrNoLibrary where it is not installed.
func OpenBLAS() (*BLAS, error) {
	// cuBLAS asks for this one by name, which is found once it is loaded.
	if _, err := loadLibrary("libcublasLt.so.13"); err != nil {
		return nil, err
	}
	lib, err := loadLibrary("libcublas.so.13")
	if err != nil {
		return nil, err
	}
	b := &BLAS{}
	var create func(handle *uintptr) int32
	err = bindAll(lib, map[string]any{
		"cublasCreate_v2": &create, "cublasDestroy_v2": &b.destroy, "cublasSetStream_v2": &b.setStream,
		"cublasGemmEx": &b.gemm,
	})
	if err != nil {
		return nil, err
	}
	return b, blasError("cublasCreate", create(&b.handle))
}

func blasError(op string, status int32) error {
	if status != 0 {
		return fmt.Errorf("cuda: %s: cublasStatus_t %d", op, status)
	}
	return nil
}

// MultiplyBF16 enqueues C = A B of n x n matrices of bf16, by the tensor cores with sums of 32 bits.
func (b *BLAS) MultiplyBF16(s *Stream, n int, a, bb, c Pointer) error {
	const (
		plain     = 0  // CUBLAS_OP_N
		bf16      = 14 // CUDA_R_16BF
		sums32    = 68 // CUBLAS_COMPUTE_32F
		automatic = -1 // CUBLAS_GEMM_DEFAULT
	)
	if err := blasError("cublasSetStream", b.setStream(b.handle, s.Handle())); err != nil {
		return err
	}
	one, zero, size := float32(1), float32(0), int32(n)
	return blasError("cublasGemmEx", b.gemm(b.handle, plain, plain, size, size, size, unsafe.Pointer(&one),
		uint64(a), bf16, size, uint64(bb), bf16, size, unsafe.Pointer(&zero), uint64(c), bf16, size, sums32, automatic))
}

// Close gives cuBLAS's memory back.
func (b *BLAS) Close() error { return blasError("cublasDestroy", b.destroy(b.handle)) }
