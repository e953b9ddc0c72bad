package gpufile

import "tuttifs/lifetime"

// headTokens is how far from its root a chain's files count as its head: instructions, tools and documents that many
// prompts begin with are about this long.
const headTokens = 4096

// lifetime is how long an item's file in a pool will probably stay, compared with others that are stored at the same
// time. Files go leaf first, and what was used last goes last, so three things tell, and they tell it beforehand:
//
//   - A file that is not full is the end of a prompt. Whoever goes on stores the full one under another key, and
//     nothing can hang on this one: it is a leaf, not used again, and goes first.
//   - Of a pool of which only the end of a chain must hit, all but that end are not used again when the chain goes on.
//   - The head of a chain is what others branch from. It goes after all of them, if ever.
func (r *reservation) lifetime(item, pool int) lifetime.Class {
	it, full := &r.items[item], r.g.pools[pool].identity.FileTokens
	switch {
	case it.Tokens < full, r.g.trailing[pool] != 0:
		return lifetime.Short
	case uint64(it.Position)*uint64(full) < headTokens:
		return lifetime.Long
	}
	return lifetime.Normal
}
