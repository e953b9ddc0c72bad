package fs

import "tuttifs/gpufile"

// What the tests with a real store, which live in a package of their own, need of this one's tests.

type (
	Scene = scene
	Pools = pools
)

func SetOpenReal(f func(s Scene) (*gpufile.Store, Payload, Pools, func() error, error)) { openReal = f }

var (
	TestKey       = testKey
	TestPayload   = testPayload
	SmallGeometry = smallGeometry
	TinyGeometry  = tinyGeometry
	BigGeometry   = bigGeometry
)

const BigFile = bigFile
