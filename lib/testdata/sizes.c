/* Prints the name and the size of every structure of the header. */
#include <stdio.h>

#include "libtuttifs.h"

#define SIZE(name) printf("%s %zu\n", #name, sizeof(struct name))

int main(void)
{
	SIZE(tuttifs_session_options);
	SIZE(tuttifs_session_stats);
	SIZE(tuttifs_run);
	SIZE(tuttifs_object);
	SIZE(tuttifs_pool_options);
	SIZE(tuttifs_pool_stats);
	SIZE(tuttifs_strided_run);
	SIZE(tuttifs_paged);
	SIZE(tuttifs_lease);
	SIZE(tuttifs_item);
	return 0;
}
