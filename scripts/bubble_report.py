"""What bubbles.py makes of its measurements: summaries, crossing points, bars, the table and the plot. No PyTorch here."""

import json
import os
import statistics
import subprocess
import typing

VERSION = 1
HIDDEN_SHARE = 0.01   # of undisturbed compute: bubbles of this much, or of HIDDEN_MS if that is less, are none
HIDDEN_MS = 2.0
MODEL_SHARE = 0.97    # of a modelled drive's rate, below which the machine is too slow for it
LOW_PERCENT = 80      # hit rates below this take long, and tell little: they come last
BACKLOG_HITS = 3      # of the hit rates, those that are measured during a backlog as well
CROSSING_BAR, BUBBLE_BAR_MS, BUBBLE_BAR_PERCENT, READ_BAR, COMPUTE_BAR = 98.0, 8.0, 93.75, 0.95, 1.01


class Drives(typing.NamedTuple):
    count: int
    options: list  # of the mount
    title: str
    read: float    # GB/s of all together, where they are modelled
    write: float


DRIVES = {
    "ram": Drives(4, [], "unthrottled drives in memory", None, None),
    "paper": Drives(2, ["drive_profile=paper"], "the paper's pair of drives, modelled", 29.0, 12.0),
}

TITLES = {
    "tuttifs": "tuttifs",
    "no-scheduler": "no scheduler",
    "no-separation": "no scheduler, reads and writes mixed",
    "no-phases": "scheduler, but no phases on the drives",
    "buffer": "a store buffer, the caller issues two layers ahead",
    "by-hand": "no scheduler, the caller issues two layers ahead",
    "polling": "polling kernels",
    "per-object": "a copy for each object, from host memory",
}


def has_phases(tuttifs):
    """Whether this command's mounts have a read/write phase for each drive."""
    text = subprocess.run([tuttifs, "mount", "--help"], capture_output=True, text=True).stdout
    return " phases=" in text


def mixed(stats):
    """Commands of a mount, so far, that met the other direction on their drive; None where nobody counts them."""
    phases = stats.get("phases")
    return sum(p["mixed_commands"] for p in phases.values()) if phases is not None else None


def since(now, before):
    return now - before if now is not None else None


def mount_options(drives, phases):
    return DRIVES[drives].options + ([] if phases else ["phases=off"])


def cached_blocks(tokens, block, percent):
    return min(max(1, round(tokens * percent / 100 / block)), tokens // block - 1)


def stages(a):
    """(drives, tokens, plans of cells), what matters most first. Each stage has a volume of its own."""
    stages = []
    for low in (False, True):
        hits = [h for h in a.hits if (h < LOW_PERCENT) == low]
        lengths = [(drives, tokens) for tokens in a.tokens for drives in a.drives]
        for drives, tokens in lengths if hits else []:
            # Copies from host memory know no drives: once will do.
            ways = [way for way in a.ways if way != "per-object" or drives == a.drives[0]]
            plans = [plan(a, drives, tokens, way, h, "own") for way in ways for h in hits]
            if has_backlog(a, drives, tokens) and not low:
                plans += [plan(a, drives, tokens, way, h, "backlog")
                          for way in a.backlog_ways for h in hits[:BACKLOG_HITS]]
            # In short prompts several hit rates are the same number of blocks.
            stages.append((drives, tokens, list({cell_key(p): p for p in reversed(plans)}.values())[::-1]))
    return stages


def has_backlog(a, drives, tokens):
    """Whether restores are measured beside a backlog of stores too."""
    return drives in a.backlog_drives and tokens == min(a.tokens)


def plan(a, drives, tokens, way, percent, stores):
    cached = cached_blocks(tokens, a.block, percent) * a.block
    return {"drives": drives, "tokens": tokens, "way": way, "hit_percent": percent, "cached_tokens": cached,
            "new_tokens": tokens - cached, "stores": stores}


def hit(cell):
    """The hit rate that came out, in whole blocks."""
    return 100 * cell["cached_tokens"] / cell["tokens"]


def summary(runs, turns):
    """Medians of runs. turns: the HBM-resident ones, one before each run and one behind the last."""
    def median(of, values):
        return statistics.median(of(v) for v in values)

    def ratios(name):
        return [r[name] / ((x[name] + y[name]) / 2) for r, x, y in zip(runs, turns, turns[1:])]
    layers = range(len(runs[0]["bubbles"]))
    return {
        "runs": len(runs),
        "ttft_ms": median(lambda r: r["ttft"], runs), "hbm_ttft_ms": median(lambda r: r["ttft"], turns),
        "ttft_ratio": statistics.median(ratios("ttft")), "ttft_ratios": ratios("ttft"),
        "compute_ms": median(lambda r: r["compute"], runs), "hbm_compute_ms": median(lambda r: r["compute"], turns),
        "compute_ratio": statistics.median(ratios("compute")), "compute_ratios": ratios("compute"),
        "bubble_ms": {"first": median(lambda r: r["bubbles"][0], runs),
                      "rest": median(lambda r: sum(r["bubbles"][1:]), runs),
                      "total": median(lambda r: sum(r["bubbles"]), runs)},
        "hbm_rest_ms": median(lambda r: sum(r["bubbles"][1:]), turns),
        "worst_layer_ms": median(lambda r: max(r["bubbles"][1:], default=0.0), runs),
        "layer_bubbles_ms": [median(lambda r: r["bubbles"][i], runs) for i in layers],
        "host_ms": {name: median(lambda r: r["host"][name], runs) for name in runs[0]["host"]},
    }


def exposed(cell):
    """Milliseconds that layers after the first were waited for, beyond what the events themselves show."""
    return max(0.0, cell["bubble_ms"]["rest"] - cell["hbm_rest_ms"])


def is_hidden(cell):
    return exposed(cell) <= min(HIDDEN_MS, HIDDEN_SHARE * cell["hbm_compute_ms"])


def crossing(cells):
    """Where restores cease to hide: see the table's text. Cells differ in their hit rates only."""
    cells = sorted(cells, key=hit)
    n = next((i for i, c in enumerate(cells) if not is_hidden(c)), len(cells))
    result = {"hidden_to": hit(cells[n - 1]) if n else None, "exposed_from": hit(cells[n]) if n < len(cells) else None}
    if n == 0 or n == len(cells):
        return {**result, "percent": None}
    low, high = hit(cells[n - 1]), hit(cells[n])
    at = low
    if n + 1 < len(cells) and exposed(cells[n + 1]) > exposed(cells[n]):
        # Exposed time grows with a line from the crossing point on.
        slope = (exposed(cells[n + 1]) - exposed(cells[n])) / (hit(cells[n + 1]) - high)
        at = high - exposed(cells[n]) / slope
    return {**result, "percent": min(max(at, low), high)}


def limit(cells, rate, layers, token_bytes):
    """The hit rate at which a layer's bytes take as long at a rate (GB/s) as undisturbed compute; None if that is
    not between the hit rates of the cells."""
    points = sorted((hit(c), c["cached_tokens"] * token_bytes / rate / 1e6 - c["hbm_compute_ms"] / layers)
                    for c in cells)
    for (h0, d0), (h1, d1) in zip(points, points[1:]):
        if d0 <= 0 < d1:
            return h0 - d0 * (h1 - h0) / (d1 - d0)
    return None


def series(report):
    """Cells by (drives, tokens, stores), then by way."""
    result = {}
    for c in report["cells"]:
        result.setdefault((c["drives"], c["tokens"], c["stores"]), {}).setdefault(c["way"], []).append(c)
    for by_way in result.values():
        for cells in by_way.values():
            cells.sort(key=hit)
    return result


def rate_of(report, drives):
    """GB/s that a restore can have at most: of the link, and of drives that are modelled."""
    rates = [r for r in (report["link_gb_per_second"], DRIVES[drives].read) if r]
    return min(rates) if rates else None


def crossings(report):
    rows = []
    token_bytes = report["object_bytes"] / report["block_tokens"]
    for (drives, tokens, stores), by_way in series(report).items():
        rate = rate_of(report, drives)
        everywhere = {hit(c): c for cells in by_way.values() for c in cells}.values()
        at = limit(everywhere, rate, report["layers"], token_bytes) if rate else None
        for way, cells in by_way.items():
            rows.append({"drives": drives, "tokens": tokens, "stores": stores, "way": way, **crossing(cells),
                         "limit_gb_per_second": rate, "limit_percent": at})
    return rows


def bars(report):
    """Figures that were promised, as far as they were measured: (what, got, wanted, met)."""
    rows = []
    first = min((c["tokens"] for c in report["cells"]), default=None)
    for r in report["crossings"]:
        if (r["drives"], r["way"], r["stores"], r["tokens"]) == ("ram", "tuttifs", "own", first):
            # Where nothing was exposed, the crossing point is beyond what was measured.
            got = r["percent"] or (r["hidden_to"] if r["exposed_from"] is None else None)
            rows.append((f"crossing point at {first >> 10} K, %", got, f">= {CROSSING_BAR}",
                         got is not None and got >= CROSSING_BAR))
    worst, violations = {}, 0
    for c in report["cells"]:
        if c["way"] != "tuttifs" or c["tokens"] != first:
            continue
        if (c["drives"], c["stores"], c["hit_percent"]) == ("ram", "own", BUBBLE_BAR_PERCENT):
            got = c["bubble_ms"]["total"]
            rows.append((f"bubbles in all at {BUBBLE_BAR_PERCENT} %, ms", got, f"<= {BUBBLE_BAR_MS}",
                         got <= BUBBLE_BAR_MS))
        kind = (c["drives"], c["stores"])
        if c.get("mixed_commands"):
            violations += c["mixed_commands"]
        if kind not in worst or worst[kind]["compute_ratio"] < c["compute_ratio"]:
            worst[kind] = c
    for (drives, stores), c in worst.items():
        got = c["compute_ratio"]
        rows.append((f"compute against undisturbed, {drives}, {stores} stores, at worst ({c['hit_percent']:g} %)", got,
                     f"<= {COMPUTE_BAR}", got <= COMPUTE_BAR))
    for r in report["backlog"]:
        if (r["drives"], r["way"]) == ("paper", "tuttifs"):
            rows.append(("paper, reads during a backlog against alone", r["ratio"], f">= {READ_BAR}",
                         r["ratio"] >= READ_BAR))
    if any(c["way"] == "tuttifs" and c.get("mixed_commands") is not None for c in report["cells"]):
        violations += sum(r.get("mixed_commands") or 0 for r in report["backlog"] if r["way"] == "tuttifs")
        rows.append(("commands that met the other direction on their drive", violations, "= 0", violations == 0))
    return [{"what": w, "got": g, "wanted": t, "met": m} for w, g, t, m in rows]


def finish(report):
    report["crossings"] = crossings(report)
    report["bars"] = bars(report)


def new(a):
    return {"bubbles_version": VERSION, "layers": a.layers, "block_tokens": a.block, "pollers": a.pollers,
            "cores": os.cpu_count(), "cells": [], "backlog": [], "sessions": [], "left_out": [], "failures": []}


def save(report, path):
    finish(report)
    with open(path + ".new", "w") as f:
        json.dump(report, f, indent=1)
        f.write("\n")
    os.replace(path + ".new", path)


def cell_key(c):
    return tuple(c.get(k) for k in ("drives", "tokens", "way", "cached_tokens", "stores", "part"))


def load(paths):
    """Joins the documents of several runs: of what was measured twice, the last one's figures count."""
    reports = []
    for path in paths:
        try:
            with open(path) as f:
                reports.append(json.load(f))
        except OSError as e:
            raise SystemExit(f"{path}: {e.strerror}") from None
        except ValueError as e:
            raise SystemExit(f"{path} is no whole JSON document: {e}") from None
        if not isinstance(reports[-1], dict) or reports[-1].get("bubbles_version") != VERSION:
            raise SystemExit(f"{path} is no document of this version of bubbles.py")
    whole = reports[0]
    for path, r in zip(paths[1:], reports[1:]):
        for k in ("gpu", "layers", "block_tokens", "object_bytes"):
            if r[k] != whole[k]:
                raise SystemExit(f"{path} has {k} {r[k]}, {paths[0]} has {whole[k]}: they cannot be joined")
        for name, key in (("cells", cell_key), ("backlog", lambda b: (b["drives"], b["way"]))):
            joined = {key(x): x for x in whole[name]}
            joined.update((key(x), x) for x in r[name])
            whole[name] = list(joined.values())
        for name in ("sessions", "left_out", "failures"):
            whole[name] += r[name]
    measured = {cell_key(c) for c in whole["cells"]}
    measured |= {(b["drives"], None, b["way"], None, None, "backlog") for b in whole["backlog"]}
    whole["left_out"] = [x for x in whole["left_out"] if cell_key(x) not in measured]
    finish(whole)
    return whole


def line(c):
    b = c["bubble_ms"]
    return (f"{c['drives']:>6} {c['tokens'] >> 10:>4} K {c['way']:>14} {c['stores']:>8} {hit(c):>7.2f} % "
            f"{c['new_tokens']:>6} {c['hbm_ttft_ms']:>9.1f} {c['ttft_ms']:>9.1f} {c['ttft_ratio']:>7.4f} "
            f"{c['compute_ratio']:>8.4f} {b['first']:>8.2f} {b['rest']:>8.2f} {b['total']:>8.2f} "
            f"{c['hbm_rest_ms']:>7.2f} {c['worst_layer_ms']:>7.2f} {c['host_ms'].get('pin', 0):>6.2f} "
            f"{c['host_ms'].get('trailers', 0):>8.2f} {c['runs']:>4} {count(c):>6}")


HEAD = (f"{'drives':>6} {'prompt':>6} {'way':>14} {'stores':>8} {'cached':>9} {'new':>6} {'hbm ms':>9} {'ttft ms':>9} "
        f"{'ratio':>7} {'compute':>8} {'first':>8} {'rest':>8} {'total':>8} {'floor':>7} {'worst':>7} {'pin':>6} "
        f"{'trailers':>8} {'runs':>4} {'mixed':>6}")


def backlog_line(r):
    modelled = DRIVES[r["drives"]]
    share = (f"; the model has {modelled.read:.0f} and {modelled.write:.0f}" if modelled.read else "")
    return (f"{r['drives']:>6} {r['way']:>14}  reads alone {r['read_only_gb_per_second']:6.2f} GB/s, during a backlog "
            f"{r['read_gb_per_second']:6.2f} ({r['ratio']:.3f}) beside writes of {r['write_gb_per_second']:5.2f}; "
            f"writes alone {r['write_only_gb_per_second']:5.2f}{share}; {count(r)} mixed commands")


def count(row):
    """Mixed commands, where they are counted."""
    n = row.get("mixed_commands")
    return "-" if n is None else str(n)


def lags(report, r):
    """Where the machine is slower than the drives that are modelled."""
    drives = DRIVES[r["drives"]]
    if drives.read and r["way"] == "tuttifs":
        for verb, got, most in (("reads", r["read_only_gb_per_second"], rate_of(report, r["drives"])),
                                ("writes", r["write_only_gb_per_second"], drives.write)):
            if got < MODEL_SHARE * most:
                yield (f"       {r['drives']}: this machine {verb} at {got:.1f} of the {most:.1f} GB/s that model and link "
                       "allow: it is the machine that is measured there")


def percent(x):
    return f"{x:.2f} %" if x is not None else "-"


def number(x):
    return f"{x:.3f}" if x is not None else "-"


def table(report):
    """The report as text."""
    lines = [f"{report['gpu'] or 'no GPU'}, {report['cores']} cores, {report['pollers']} pollers, {report['layers']} "
             f"layers, objects of {report['object_bytes'] >> 10} KiB"
             + (f", link {report['link_gb_per_second']:.1f} GB/s" if report["link_gb_per_second"] else ""), ""]
    lines += ["Bubbles, ms: how long the compute stream stood still before the first layer, and before all others. floor: "
              "what the", "events show of the latter where nothing is waited for. compute: against the HBM-resident "
              "run, bubbles left out.", HEAD]
    lines += [line(c) for by_way in series(report).values() for cells in by_way.values() for c in cells]
    lines += ["", f"Crossing points. Hidden: the layers after the first wait for at most {HIDDEN_MS:g} ms and "
              f"{100 * HIDDEN_SHARE:g} % of compute, floor left", "out, at this hit rate and all lower ones. The "
              "crossing point is where the line through the two lowest hit rates that",
              "are exposed comes to zero, but in the bracket. limit: where a layer's bytes take as long as its compute."]
    lines += [f"{'drives':>6} {'prompt':>6} {'way':>14} {'stores':>8} {'crossing':>9} {'hidden to':>10} "
              f"{'exposed from':>12} {'limit':>9} {'at GB/s':>8}"]
    for r in report["crossings"]:
        rate = f"{r['limit_gb_per_second']:.1f}" if r["limit_gb_per_second"] else "-"
        lines.append(f"{r['drives']:>6} {r['tokens'] >> 10:>4} K {r['way']:>14} {r['stores']:>8} "
                     f"{percent(r['percent']):>9} {percent(r['hidden_to']):>10} {percent(r['exposed_from']):>12} "
                     f"{percent(r['limit_percent']):>9} {rate:>8}")
    if report["backlog"]:
        lines += ["", "A permanent backlog of stores, restores without compute"] + [backlog_line(r)
                                                                                  for r in report["backlog"]]
        lines += [text for r in report["backlog"] for text in lags(report, r)]
    if report["bars"]:
        lines += ["", "Bars"] + [f"  {b['what']}: {number(b['got'])} (wanted {b['wanted']}): "
                                 + ("met" if b["met"] else "MISSED") for b in report["bars"]]
    reasons = {}
    for x in report["left_out"]:
        reasons.setdefault((x["drives"], x["way"], x["reason"]), []).append(x)
    if reasons:
        lines += ["", "Left out"] + [f"  {d}, {w}: {len(x)} cells: {why}" for (d, w, why), x in reasons.items()]
    lines += ["failed: " + x for x in report["failures"]]
    return "\n".join(lines)


def plot(report, path):
    """Bubbles by hit rate, a panel for each prompt length and kind of drives, and the backlog's bandwidths."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    panels = {k: v for k, v in series(report).items() if k[2] == "own"}
    backlog = report["backlog"]
    drives = [d for d in DRIVES if any(k[0] == d for k in panels)]
    lengths = sorted({k[1] for k in panels})
    columns = max(1, len(lengths)) + (1 if backlog else 0)
    rows = max(1, len(drives))
    figure, axes = plt.subplots(rows, columns, figsize=(5.6 * columns, 4.4 * rows), squeeze=False)
    found = {(r["drives"], r["tokens"], r["way"]): r for r in report["crossings"] if r["stores"] == "own"}
    colours = dict(zip(TITLES, plt.rcParams["axes.prop_cycle"].by_key()["color"]))
    for i, d in enumerate(drives):
        for j, tokens in enumerate(lengths):
            axis = axes[i][j]
            if (d, tokens, "own") in panels:
                draw_bubbles(axis, panels[d, tokens, "own"], colours,
                             {way: r for (x, t, way), r in found.items() if (x, t) == (d, tokens)})
                axis.set_title(f"{tokens >> 10} K tokens, {DRIVES[d].title}", fontsize=9)
            else:
                axis.axis("off")
        if backlog:
            draw_backlog(axes[i][-1], [r for r in backlog if r["drives"] == d], DRIVES[d])
    handles = {}
    for axis in figure.axes:
        handles.update({label: h for h, label in zip(*axis.get_legend_handles_labels())})
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=3, fontsize=8, frameon=False)
    figure.suptitle(f"Time the compute stream waits for a cached prefix ({report['gpu'] or 'no GPU'})", fontsize=11)
    figure.tight_layout(rect=(0, 0.04 + 0.05 / rows, 1, 0.98))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_bubbles(axis, by_way, colours, found):
    for way, cells in by_way.items():
        axis.plot([100 - hit(c) for c in cells], [c["bubble_ms"]["total"] for c in cells], marker="o", markersize=3.5,
                  color=colours[way], label=TITLES[way])
        if found[way]["percent"]:
            axis.axvline(100 - found[way]["percent"], color=colours[way], linestyle=":", linewidth=1)
    at = next(iter(found.values()))["limit_percent"]
    if at:
        axis.axvline(100 - at, color="black", linestyle="--", linewidth=0.8, label="limit of link or drives")
    axis.set_xscale("log")
    axis.invert_xaxis()
    axis.set_yscale("log")
    ticks = sorted({c["hit_percent"] for cells in by_way.values() for c in cells})
    axis.set_xticks([100 - t for t in ticks], [f"{t:g}" for t in ticks], fontsize=7, rotation=45)
    axis.set_xticks([], minor=True)
    axis.set_xlabel("% of the prompt that is cached; dotted: crossing points", fontsize=8)
    axis.set_ylabel("bubbles of all layers, ms", fontsize=8)
    axis.grid(True, linewidth=0.3)


def draw_backlog(axis, rows, drives):
    if not rows:
        axis.axis("off")
        return
    at = range(len(rows))
    for shift, name, label, colour in ((-0.27, "read_only_gb_per_second", "reads alone", "0.75"),
                                       (0.0, "read_gb_per_second", "reads during a backlog of stores", "0.45"),
                                       (0.27, "write_gb_per_second", "its writes", "0.15")):
        axis.bar([x + shift for x in at], [r[name] for r in rows], width=0.25, color=colour, label=label)
    axis.set_xticks(list(at), [r["way"] for r in rows], fontsize=7)
    axis.set_ylabel("GB/s", fontsize=8)
    axis.set_title(f"backlog, {drives.title}", fontsize=9)
    axis.grid(True, axis="y", linewidth=0.3)
