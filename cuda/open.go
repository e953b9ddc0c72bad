package cuda

import _ "github.com/ebitengine/purego"
