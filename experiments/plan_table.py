"""A plan for people: experiments.plan's dict as lines."""

from __future__ import annotations

from typing import Any

from glm_jax.parallel.planning import GIB


def table(found: dict[str, Any]) -> str:
    """The plan, a subject a line."""
    memory, seconds, decode = found["memory"], found["roofline_seconds"], found["stage"] == "decode"
    lines = [
        f"{found['preset']} {found['stage']}, {found['global_batch']} {'sessions' if decode else 'rows'} x {found['sequence']} "
        f"{'slots' if decode else 'tokens'}, "
        f"on {found['topology']} of {found['devices']} devices",
        f"mesh {mesh_text(found)}", *(f"  {line}" for line in found["why"])]
    if "remat" in found:
        lines.append(f"computes in bfloat16, master weights float32, moments {found['moments']}, remat {found['remat']}")
    lines.append("memory a chip")
    for name, size in memory.items():
        if name in ("used", "available", "gradients_in_temporaries"):
            continue
        lines.append(f"  {name.replace('_', ' '):20}{size / GIB:10.3f} GiB")
        if name == "temporaries" and "gradients_in_temporaries" in memory:
            lines[-1] += f"  (gradients among them, as float32: {memory['gradients_in_temporaries'] / GIB:.3f} GiB)"
    lines += [
        f"  {'in all':20}{memory['used'] / GIB:10.3f} GiB of {memory['available'] / GIB:.2f} ({memory['used'] / memory['available']:.0%})",
        "spread over chips: " + ", ".join(f"{name.replace('_', ' ')} {one['spread']:.3f}" for name, one in found["shardings"].items()),
        "a step and chip",
        f"  {found['flops']:.4g} FLOPs, {found['hbm_bytes']:.4g} B of HBM traffic",
        "  sent: " + (", ".join(f"{kind} {size:.4g} B" for kind, size in sorted(found["collective_bytes"].items())) or "nothing"),
        *(f"  counted once, its trips or FLOPs being unknown: {name}" for name in found["uncounted"]),
        f"  compute {seconds['compute']:.4g} s, HBM {seconds['hbm']:.4g} s, ICI {seconds['ici']:.4g} s",
        f"roofline step time {found['step_seconds']:.4g} s, bound by {found['bound']}",
        f"model FLOPs: {found['model_flops_formula']}",
        f"model FLOP utilisation {100 * found['utilisation']:.3g} % = {found['utilisation_formula']}",
        f"traced in {found['trace_seconds']:.1f} s, compiled in {found['compile_seconds']:.1f} s",
    ]
    return "\n".join(lines)


def mesh_text(found: dict[str, Any]) -> str:
    return ", ".join(f"{name}={n}" for name, n in found["mesh"].items()) or "one device"
