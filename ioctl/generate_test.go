package ioctl

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"reflect"
	"regexp"
	"strings"
	"unicode"
)

// cHeader makes include/tuttifs.h: constants, structs and their comments taken from the Go sources of the ABI, sizes
// asserted. The generator lives with the tests so that the product does not carry a Go parser.
func cHeader() ([]byte, error) {
	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range []string{"abi.go", "attach.go"} {
		f, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
		if err != nil {
			return nil, fmt.Errorf("ioctl: parse the ABI: %w", err)
		}
		files = append(files, f)
	}
	// Only constants are wanted of the type checker; imports and this package's other files are unknown to it, and
	// not needed.
	conf := types.Config{Error: func(error) {}, IgnoreFuncBodies: true}
	pkg, _ := conf.Check("ioctl", fset, files, nil)
	h := header{scope: pkg.Scope(), sizes: structSizes()}
	h.begin()
	for _, f := range files {
		for _, d := range f.Decls {
			if g, ok := d.(*ast.GenDecl); ok {
				h.decl(g)
			}
		}
	}
	h.end()
	return h.out.Bytes(), h.err
}

// structSizes has every struct's size by its Go name.
func structSizes() map[string]uintptr {
	m := map[string]uintptr{}
	for _, t := range abiStructs() {
		m[t.Name()] = t.Size()
	}
	return m
}

type header struct {
	out   bytes.Buffer
	scope *types.Scope
	sizes map[string]uintptr
	err   error
}

func (h *header) begin() {
	h.out.WriteString(`/* Code generated from the Go sources of package ioctl; DO NOT EDIT. */
/* ABI v1 of a tuttifs mount. docs/abi.md is its prose. Integers are little-endian. */
#ifndef TUTTIFS_H
#define TUTTIFS_H

#include <stdint.h>
#include <sys/ioctl.h>

#ifdef __cplusplus
#define TUTTIFS_SIZE(s, n) static_assert(sizeof(struct s) == (n), "size of struct " #s)
extern "C" {
#else
#define TUTTIFS_SIZE(s, n) _Static_assert(sizeof(struct s) == (n), "size of struct " #s)
#endif
`)
}

func (h *header) end() {
	h.out.WriteString("\n/* The verbs. */\n")
	for nr := uint32(1); nr < nrEnd; nr++ {
		v := &verbs[nr]
		fmt.Fprintf(&h.out, "#define TUTTIFS_IOC_%-14s _IOWR('T', %d, struct tuttifs_%s)\n", v.name, nr, snake(v.typ.Name()))
	}
	h.out.WriteString("\n#ifdef __cplusplus\n}\n#endif\n#undef TUTTIFS_SIZE\n#endif /* TUTTIFS_H */\n")
}

func (h *header) decl(g *ast.GenDecl) {
	switch g.Tok {
	case token.CONST:
		h.constants(g)
	case token.TYPE:
		for _, s := range g.Specs {
			t := s.(*ast.TypeSpec)
			if st, ok := t.Type.(*ast.StructType); ok {
				h.structure(t.Name.Name, st, g.Doc)
			}
		}
	}
}

func (h *header) constants(g *ast.GenDecl) {
	h.out.WriteByte('\n')
	h.comment(g.Doc)
	for _, s := range g.Specs {
		v := s.(*ast.ValueSpec)
		for _, name := range v.Names {
			c, ok := h.scope.Lookup(name.Name).(*types.Const)
			if !ok || !name.IsExported() {
				continue
			}
			u, exact := constant.Uint64Val(constant.ToInt(c.Val()))
			if !exact {
				h.err = fmt.Errorf("ioctl: constant %s is not an unsigned integer", name.Name)
				return
			}
			text := fmt.Sprint(u)
			if u > 1<<31-1 {
				text = fmt.Sprintf("%#xull", u)
			}
			if u > 1<<31-1 && u <= 1<<32-1 {
				text = fmt.Sprintf("%#xu", u)
			}
			line := fmt.Sprintf("#define TUTTIFS_%s %s", strings.ToUpper(snake(name.Name)), text)
			h.line("", line, firstOf(v.Comment, v.Doc))
		}
	}
}

func (h *header) structure(name string, st *ast.StructType, doc *ast.CommentGroup) {
	size, ok := h.sizes[name]
	if !ok {
		return
	}
	about := strings.Replace(commentText(doc), name, "struct tuttifs_"+snake(name), 1)
	fmt.Fprintf(&h.out, "\n/* %s */\nstruct tuttifs_%s {\n", wrap(h.cNames(about)), snake(name))
	for _, f := range st.Fields.List {
		if f.Names[0].Name == "_" {
			continue
		}
		typ, dims := h.cType(f.Type)
		note := commentText(f.Comment)
		if f.Tag != nil && strings.Contains(f.Tag.Value, `abi:"out"`) {
			note = strings.TrimSuffix("out: "+note, ": ")
		}
		for _, n := range f.Names {
			h.lineText("\t", fmt.Sprintf("%s %s%s;", typ, snake(n.Name), dims), note)
		}
	}
	fmt.Fprintf(&h.out, "};\nTUTTIFS_SIZE(tuttifs_%s, %d);\n", snake(name), size)
}

// cType is a field's C type and array dimensions.
func (h *header) cType(e ast.Expr) (typ, dims string) {
	switch t := e.(type) {
	case *ast.ArrayType:
		typ, dims = h.cType(t.Elt)
		return typ, "[" + h.length(t.Len) + "]" + dims
	case *ast.Ident:
		switch t.Name {
		case "uint8", "byte":
			return "uint8_t", ""
		case "uint16", "uint32", "uint64", "int32":
			return t.Name + "_t", ""
		}
		if _, ok := h.sizes[t.Name]; ok {
			return "struct tuttifs_" + snake(t.Name), ""
		}
		h.err = fmt.Errorf("ioctl: type %s has no place in the ABI", t.Name)
	default:
		h.err = fmt.Errorf("ioctl: type %T has no place in the ABI", e)
	}
	return "void", ""
}

func (h *header) length(e ast.Expr) string {
	switch n := e.(type) {
	case *ast.BasicLit:
		return n.Value
	case *ast.Ident:
		return "TUTTIFS_" + strings.ToUpper(snake(n.Name))
	}
	h.err = fmt.Errorf("ioctl: array length %T has no place in the ABI", e)
	return "0"
}

func (h *header) comment(c *ast.CommentGroup) {
	if text := commentText(c); text != "" {
		fmt.Fprintf(&h.out, "/* %s */\n", wrap(h.cNames(text)))
	}
}

func (h *header) line(indent, text string, c *ast.CommentGroup) {
	h.lineText(indent, text, commentText(c))
}

func (h *header) lineText(indent, text, note string) {
	if note != "" {
		text += " /* " + h.cNames(note) + " */"
	}
	h.out.WriteString(indent + text + "\n")
}

func firstOf(a, b *ast.CommentGroup) *ast.CommentGroup {
	if a != nil {
		return a
	}
	return b
}

func commentText(c *ast.CommentGroup) string {
	return strings.Join(strings.Fields(c.Text()), " ")
}

// wrap breaks a comment at 100 columns.
func wrap(s string) string {
	var b strings.Builder
	column := 3
	for i, w := range strings.Fields(s) {
		switch {
		case i > 0 && column+1+len(w) > 100:
			b.WriteString("\n * ")
			column = 3
		case i > 0:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(w)
		column += len(w)
	}
	return b.String()
}

// cNames turns the Go names in a comment into those of C: constants, structs, and fields behind a dot.
func (h *header) cNames(s string) string {
	return goName.ReplaceAllStringFunc(s, func(w string) string {
		name, field, dotted := strings.Cut(w, ".")
		if c, ok := h.scope.Lookup(name).(*types.Const); ok && c.Exported() && !dotted {
			return "TUTTIFS_" + strings.ToUpper(snake(name))
		}
		_, isStruct := h.sizes[name]
		switch {
		case isStruct && dotted:
			return "tuttifs_" + snake(name) + "." + snake(field)
		case isStruct && strings.IndexFunc(name[1:], unicode.IsUpper) > 0: // a simple word may be just a word
			return "struct tuttifs_" + snake(name)
		}
		return w
	})
}

var goName = regexp.MustCompile(`\b[A-Z]\w+(\.[A-Z]\w+)?`)

// snake turns DMABytes into dma_bytes. Errno is a macro in C, so it is called error there.
func snake(s string) string {
	if s == "Errno" {
		return "error"
	}
	r := []rune(s)
	var b strings.Builder
	for i, c := range r {
		if i > 0 && unicode.IsUpper(c) {
			after := i+1 < len(r) && unicode.IsLower(r[i+1])
			if !unicode.IsUpper(r[i-1]) || after {
				b.WriteByte('_')
			}
		}
		b.WriteRune(unicode.ToLower(c))
	}
	return b.String()
}

// abiStructs lists every struct that crosses the process boundary.
func abiStructs() []reflect.Type {
	return []reflect.Type{
		reflect.TypeFor[Header](), reflect.TypeFor[Target](), reflect.TypeFor[Span](), reflect.TypeFor[Hello](),
		reflect.TypeFor[DriveEntry](), reflect.TypeFor[Drives](), reflect.TypeFor[Session](), reflect.TypeFor[Arena](),
		reflect.TypeFor[PoolOpen](), reflect.TypeFor[PoolInfo](), reflect.TypeFor[Layout](), reflect.TypeFor[RowEntry](),
		reflect.TypeFor[RowHead](), reflect.TypeFor[Rows](), reflect.TypeFor[MapAck](), reflect.TypeFor[Peek](),
		reflect.TypeFor[Grant](), reflect.TypeFor[Pin](), reflect.TypeFor[Release](), reflect.TypeFor[ReserveItem](),
		reflect.TypeFor[Reserve](), reflect.TypeFor[Commit](), reflect.TypeFor[Abort](), reflect.TypeFor[ReportBad](),
		reflect.TypeFor[Evict](), reflect.TypeFor[Unlink](), reflect.TypeFor[Extent](), reflect.TypeFor[Extents](),
		reflect.TypeFor[Stats](), reflect.TypeFor[Event](), reflect.TypeFor[Events](), reflect.TypeFor[Ticket](),
		reflect.TypeFor[Change](), reflect.TypeFor[Changes](), reflect.TypeFor[Present](),
		reflect.TypeFor[AttachRequest](), reflect.TypeFor[AttachReply](), reflect.TypeFor[EngineCounters](),
		reflect.TypeFor[DriveShare](),
		reflect.TypeFor[DriveBells](), reflect.TypeFor[PairBells](),
	}
}
