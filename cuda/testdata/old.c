// A driver of long ago, with one of the functions.
int cuInit(unsigned flags) { return (int)flags; }
