"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits
where it must.

Before its `gdc_wait` a kernel may read only what no kernel of the step writes: weights, tables,
lengths, block tables, cached tokens of earlier steps. The launch gets `launch_options(True)`, the
kernel the constexpr PDL=True. Needs compute capability 9.0.
"""

from typing import Any

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    HAS_PDL = True
except ImportError:  # Triton before 3.4: kernels compile without it, because PDL is then never True
    gdc_launch_dependents = gdc_wait = None
    HAS_PDL = False

__all__ = ["HAS_PDL", "gdc_launch_dependents", "gdc_wait", "launch_options"]


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch that switch programmatic dependent launch on."""
    return {"launch_pdl": True} if pdl else {}
