//go:build !race

package gpufile

const raceDetector = false
