//go:build race

package gpufile

// raceDetector makes tests smaller that it slows down tenfold.
const raceDetector = true
