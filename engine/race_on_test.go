//go:build race

package engine

// raceDetector makes tests smaller that it slows down tenfold.
const raceDetector = true
