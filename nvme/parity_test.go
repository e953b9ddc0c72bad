package nvme

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// parity compares offsets, sizes and status codes with what a C compiler makes of the installed headers.
type parity struct {
	expr string
	want uintptr
}

func runParity(t *testing.T, header string, checks []parity) {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	dir := t.TempDir()
	var src bytes.Buffer
	fmt.Fprintf(&src, "#include <stddef.h>\n#include <stdio.h>\n#include <%s>\nint main(void) {\n", header)
	for _, c := range checks {
		fmt.Fprintf(&src, "\tprintf(\"%%zu\\n\", (size_t)(%s));\n", c.expr)
	}
	src.WriteString("\treturn 0;\n}\n")
	file, bin := filepath.Join(dir, "parity.c"), filepath.Join(dir, "parity")
	require.NoError(t, os.WriteFile(file, src.Bytes(), 0o600))
	probe := exec.Command(cc, "-E", "-x", "c", "-")
	probe.Stdin = bytes.NewBufferString("#include <" + header + ">\n")
	if probe.Run() != nil {
		t.Skipf("header %s is not installed", header)
	}
	out, err := exec.Command(cc, "-o", bin, file).CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command(bin).Output()
	require.NoError(t, err)
	lines := bytes.Fields(out)
	require.Len(t, lines, len(checks))
	for i, c := range checks {
		require.Equal(t, fmt.Sprint(c.want), string(lines[i]), c.expr)
	}
}

// The kernel's pass-through command is a submission entry whose data pointer is in parts.
func TestParityKernel(t *testing.T) {
	runParity(t, "linux/nvme_ioctl.h", []parity{
		{"offsetof(struct nvme_passthru_cmd, opcode)", unsafe.Offsetof(SQE{}.Opcode)},
		{"offsetof(struct nvme_passthru_cmd, flags)", unsafe.Offsetof(SQE{}.Flags)},
		{"offsetof(struct nvme_passthru_cmd, rsvd1)", unsafe.Offsetof(SQE{}.CID)},
		{"offsetof(struct nvme_passthru_cmd, nsid)", unsafe.Offsetof(SQE{}.NSID)},
		{"offsetof(struct nvme_passthru_cmd, cdw2)", unsafe.Offsetof(SQE{}.CDW2)},
		{"offsetof(struct nvme_passthru_cmd, cdw3)", unsafe.Offsetof(SQE{}.CDW3)},
		{"offsetof(struct nvme_passthru_cmd, metadata)", unsafe.Offsetof(SQE{}.MPTR)},
		{"offsetof(struct nvme_passthru_cmd, addr)", unsafe.Offsetof(SQE{}.DPTR)},
		{"offsetof(struct nvme_passthru_cmd, cdw10)", unsafe.Offsetof(SQE{}.CDW10)},
		{"offsetof(struct nvme_passthru_cmd, cdw15)", unsafe.Offsetof(SQE{}.CDW15)},
	})
}

func TestParityTypes(t *testing.T) {
	var (
		c IdentifyController
		n IdentifyNamespace
		l SMARTLog
		e ErrorLogEntry
	)
	checks := []parity{
		{"sizeof(struct nvme_id_ctrl)", unsafe.Sizeof(c)},
		{"sizeof(struct nvme_id_ns)", unsafe.Sizeof(n)},
		{"sizeof(struct nvme_smart_log)", unsafe.Sizeof(l)},
		{"sizeof(struct nvme_error_log_page)", unsafe.Sizeof(e)},
		{"sizeof(struct nvme_dsm_range)", unsafe.Sizeof(DSMRange{})},
		{"offsetof(struct nvme_dsm_range, slba)", unsafe.Offsetof(DSMRange{}.LBA)},
	}
	add := func(typ string, fields map[string]uintptr) {
		for f, off := range fields {
			checks = append(checks, parity{fmt.Sprintf("offsetof(struct %s, %s)", typ, f), off})
		}
	}
	add("nvme_id_ctrl", map[string]uintptr{
		"ssvid": unsafe.Offsetof(c.SSVID), "sn": unsafe.Offsetof(c.SN), "mn": unsafe.Offsetof(c.MN),
		"fr": unsafe.Offsetof(c.FR), "rab": unsafe.Offsetof(c.RAB), "mdts": unsafe.Offsetof(c.MDTS),
		"endgidmax": unsafe.Offsetof(c.ENDGIDMAX),
		"cntlid":    unsafe.Offsetof(c.CNTLID), "ver": unsafe.Offsetof(c.VER), "ctratt": unsafe.Offsetof(c.CTRATT),
		"cntrltype": unsafe.Offsetof(c.CNTRLTYPE), "crdt1": unsafe.Offsetof(c.CRDT),
		"oacs": unsafe.Offsetof(c.OACS), "acl": unsafe.Offsetof(c.ACL), "aerl": unsafe.Offsetof(c.AERL),
		"lpa": unsafe.Offsetof(c.LPA), "elpe": unsafe.Offsetof(c.ELPE), "wctemp": unsafe.Offsetof(c.WCTEMP),
		"tnvmcap": unsafe.Offsetof(c.TNVMCAP), "kas": unsafe.Offsetof(c.KAS), "sqes": unsafe.Offsetof(c.SQES),
		"maxcmd": unsafe.Offsetof(c.MAXCMD), "nn": unsafe.Offsetof(c.NN), "oncs": unsafe.Offsetof(c.ONCS),
		"fuses": unsafe.Offsetof(c.FUSES), "vwc": unsafe.Offsetof(c.VWC), "awun": unsafe.Offsetof(c.AWUN),
		"nwpc": unsafe.Offsetof(c.NWPC), "sgls": unsafe.Offsetof(c.SGLS), "mnan": unsafe.Offsetof(c.MNAN),
		"subnqn": unsafe.Offsetof(c.SUBNQN), "psd": unsafe.Offsetof(c.PSD),
	})
	add("nvme_id_ns", map[string]uintptr{
		"nsze": unsafe.Offsetof(n.NSZE), "nsfeat": unsafe.Offsetof(n.NSFEAT), "flbas": unsafe.Offsetof(n.FLBAS),
		"dlfeat": unsafe.Offsetof(n.DLFEAT), "nvmcap": unsafe.Offsetof(n.NVMCAP), "npwg": unsafe.Offsetof(n.NPWG),
		"nows": unsafe.Offsetof(n.NOWS), "anagrpid": unsafe.Offsetof(n.ANAGRPID),
		"nsattr": unsafe.Offsetof(n.NSATTR), "nguid": unsafe.Offsetof(n.NGUID), "eui64": unsafe.Offsetof(n.EUI64),
		"lbaf": unsafe.Offsetof(n.LBAF),
	})
	add("nvme_smart_log", map[string]uintptr{
		"temperature": unsafe.Offsetof(l.Temperature), "avail_spare": unsafe.Offsetof(l.Spare),
		"data_units_read": unsafe.Offsetof(l.DataUnitsRead), "media_errors": unsafe.Offsetof(l.MediaErrors),
		"num_err_log_entries": unsafe.Offsetof(l.ErrorLogEntries), "temp_sensor": unsafe.Offsetof(l.Sensors),
	})
	add("nvme_error_log_page", map[string]uintptr{
		"sqid": unsafe.Offsetof(e.SQID), "status_field": unsafe.Offsetof(e.Status), "lba": unsafe.Offsetof(e.LBA),
		"parm_error_location": unsafe.Offsetof(e.Location), "nsid": unsafe.Offsetof(e.NSID),
		"cs": unsafe.Offsetof(e.Specific),
	})
	for name, s := range map[string]Status{
		"INVALID_OPCODE": InvalidOpcode, "INVALID_FIELD": InvalidField, "DATA_XFER_ERROR": DataTransferError,
		"ABORT_REQ": AbortRequested, "ABORT_QUEUE": SQDeleted, "INVALID_NS": InvalidNamespace,
		"CMD_SEQ_ERROR": SequenceError, "SGL_INVALID_LAST": SGLSegmentInvalid, "SGL_INVALID_COUNT": SGLCountInvalid,
		"SGL_INVALID_DATA": SGLLengthInvalid, "SGL_INVALID_TYPE": SGLTypeInvalid,
		"PRP_INVALID_OFFSET": PRPOffsetInvalid, "SGL_INVALID_OFFSET": SGLOffsetInvalid,
		"NS_WRITE_PROTECTED": WriteProtected, "LBA_RANGE": LBAOutOfRange,
	} {
		checks = append(checks, parity{"NVME_SC_" + name, uintptr(s)})
	}
	for name, s := range map[string]Status{
		"CQ_INVALID": CQInvalid, "QID_INVALID": QueueIDInvalid, "QUEUE_SIZE": QueueSizeInvalid,
		"ABORT_LIMIT": AbortLimit, "ASYNC_LIMIT": AsyncEventLimit, "INVALID_VECTOR": VectorInvalid,
		"INVALID_LOG_PAGE": LogPageInvalid, "INVALID_QUEUE": QueueDeletion,
		"FEATURE_NOT_SAVEABLE": FeatureNotSaveable, "FEATURE_NOT_CHANGEABLE": FeatureNotChangable,
		"BAD_ATTRIBUTES": AttributesConflict,
	} {
		checks = append(checks, parity{"NVME_SC_" + name + " | 0x100", uintptr(s)})
	}
	for name, s := range map[string]Status{
		"WRITE_FAULT": WriteFault, "READ_ERROR": UnrecoveredRead, "ACCESS_DENIED": AccessDenied,
	} {
		checks = append(checks, parity{"NVME_SC_" + name + " | 0x200", uintptr(s)})
	}
	runParity(t, "nvme/types.h", checks)
}
