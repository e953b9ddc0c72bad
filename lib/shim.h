/* What Go and the shim share beyond the interface. */
#ifndef SHIM_H
#define SHIM_H

#include "libtuttifs.h"

#define TEXT_BYTES 2048 /* room for an error's text */

#endif
