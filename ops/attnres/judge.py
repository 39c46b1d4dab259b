"""How the AttnRes ops are judged and timed: inputs for given dims and options, cases, references, peers, limits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops.attnres import inputs as families
from k3dsl.ops.attnres import reference
from k3dsl.runtime.op import Case


def _numbers(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int, sites: int = 1) -> Any:
    """Random rows, weights in their dtypes."""
    io = to_torch(options["dtype"])
    x = families.make("random", dims.get("N", 0), dims["T"], dims["D"], io, sites=sites, device=device, seed=seed)
    for name, option in (("query", "query_dtype"), ("key_norm", "key_norm_dtype"), ("norm_weight", "norm_dtype")):
        if options.get(option) is not None:
            x[name] = x[name].to(to_torch(options[option]))
    return x


def _site_arguments(x: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the one-site functions share."""
    out = {"prefix": x["prefix"], "query": x["query"], "key_norm": x["key_norm"] if options["key_norm"] else None}
    out |= {"eps": options["eps"], "norm_eps": options["norm_eps"]}
    out["norm_weight"] = x["norm_weight"] if options["normed"] else None
    out["return_h"] = options["h"]
    if options["snapshot"]:
        out["snapshot"] = torch.zeros_like(x["prefix"])
    return out


def site_inputs(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int) -> dict[str, Any]:
    """Random rows."""
    x = _numbers(dims, options, device, seed)
    arguments = {"bank": x["bank"], **_site_arguments(x, options)}
    if options["logits"]:
        weight = x["query"].double() * (x["key_norm"].double() if options["key_norm"] else 1.0)
        arguments["logits"] = reference.scores(x["bank"], weight[None], options["eps"])[0].float()
    return arguments


def merge_inputs(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int) -> dict[str, Any]:
    """What phase 1 leaves of eight random rows."""
    x = _numbers({**dims, "N": 8}, options, device, seed)
    weight = x["query"].double() * (x["key_norm"].double() if options["key_norm"] else 1.0)
    m, l, o = (t[0].float() for t in reference.phase1(x["bank"], weight[None], options["eps"]))
    return {"m": m, "l": l, "o": o, **_site_arguments(x, options)}


def phase1_inputs(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int) -> dict[str, Any]:
    """Random rows; queries of all sites."""
    x = _numbers(dims, options, device, seed, dims["S"])
    queries = x["query"].reshape(dims["S"], dims["D"])
    return {"bank": x["bank"], "queries": queries, "eps": options["eps"], "mix": options["mix"]}


def _outputs(found: Any, x: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of a one-site function by name."""
    named: dict[str, Any] = {}
    if x["norm_weight"] is None:
        named["h"] = found
    elif x["return_h"]:
        named["h"], named["normed"] = found
    else:
        named["normed"] = found
    if x.get("snapshot") is not None:
        named["snapshot"] = x["snapshot"]
    return named


def site_call(**x: Any) -> dict[str, Any]:
    """`attnres` with its outputs by name."""
    from k3dsl.ops.attnres.api import attnres

    return _outputs(attnres(**x), x)


def merge_call(**x: Any) -> dict[str, Any]:
    """`attnres_merge` with its outputs by name."""
    from k3dsl.ops.attnres.api import attnres_merge

    return _outputs(attnres_merge(**x), x)


def phase1_call(*, mix: bool, **x: Any) -> dict[str, Any]:
    """`attnres_phase1`, or without mix `attnres_logits`, with outputs by name."""
    from k3dsl.ops.attnres.api import attnres_logits, attnres_phase1

    names = ("top", "total", "mixed") if mix else ("logits", "inv_rms")
    return dict(zip(names, (attnres_phase1 if mix else attnres_logits)(**x), strict=True))


def site_reference(**x: Any) -> dict[str, Any]:
    """The fp64 definition; given logits are not looked at."""
    snapshot, return_h = x.pop("snapshot", None), x.pop("return_h", True)
    x.pop("logits", None)
    h, normed = reference.attnres(**x)
    named = {"h": h} if return_h else {}
    return (
        named
        | ({"normed": normed} if normed is not None else {})
        | ({"snapshot": x["prefix"].double()} if snapshot is not None else {})
    )


def merge_reference(*, m: torch.Tensor, l: torch.Tensor, o: torch.Tensor, **x: Any) -> dict[str, Any]:
    """One row whose logit and values are what phase 1 left, and the prefix, in fp64."""
    prefix = x["prefix"].double()
    w = x["query"].double() * (1.0 if x["key_norm"] is None else x["key_norm"].double())
    own = reference.scores(prefix[None], w[None], x["eps"])[0, :, 0]
    joint = torch.logaddexp(m.double() + l.double().log(), own)
    h = (m.double() - joint).exp()[:, None] * o.double() + (own - joint).exp()[:, None] * prefix
    named = {"h": h} if x["return_h"] else {}
    if x["norm_weight"] is not None:
        named["normed"] = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + x["norm_eps"]) * x["norm_weight"].double()
    if x.get("snapshot") is not None:
        named["snapshot"] = prefix
    return named


def phase1_reference(*, mix: bool, **x: Any) -> dict[str, Any]:
    """The fp64 definition."""
    if mix:
        return dict(zip(("top", "total", "mixed"), reference.phase1(**x), strict=True))
    inverse = torch.rsqrt(x["bank"].double().square().mean(-1) + x["eps"])
    return {"logits": reference.scores(x["bank"], x["queries"], x["eps"]), "inv_rms": inverse}


def peers() -> dict[str, Any]:
    """fla's fused_attnres where it can be imported, and plain torch."""
    found: dict[str, Any] = {"torch": _torch}
    try:
        from fla.ops.attnres import fused_attnres
    except ImportError:
        return found

    def fla(**x: Any) -> dict[str, Any]:
        key_norm = torch.ones_like(x["query"]) if x["key_norm"] is None else x["key_norm"]
        rows = [*x["bank"].unbind(0), x["prefix"]]
        o = fused_attnres(x["query"], rows, key_norm, output_rms_weight=x["norm_weight"], rms_eps=x["eps"])
        return {"h" if x["norm_weight"] is None else "normed": o}

    return {**found, "fla fused_attnres": fla}


def _torch(**x: Any) -> dict[str, Any]:
    """Plain torch: stack, norm, scores, softmax, mix."""
    from k3dsl.ops.attnres.api import plain

    h, normed = plain(x["bank"], x["prefix"], x["query"], x["key_norm"], x["eps"], x["norm_weight"], x["norm_eps"])
    named = {"h": h} if x["return_h"] else {}
    return named | ({"normed": normed} if normed is not None else {})


def limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Largest relative RMS error: the rounding of h, and for the norm two more; fp32 sums in another order."""
    h = {bf16: 4e-3, f16: 5e-4, f32: 3e-6}[options["dtype"]]
    found = {"h": h} if options["h"] else {}
    found |= {"normed": 1.5 * h} if options["normed"] else {}
    return found | ({"snapshot": 0.0} if options["snapshot"] else {})


def phase1_limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Largest relative RMS error: fp32 throughout, logits from exact products."""
    return dict.fromkeys(("top", "total", "mixed") if options["mix"] else ("logits", "inv_rms"), 1e-5)


def cases(size: str) -> list[Case]:
    """Every family at several numbers of rows and tokens; whole: at K3's width too."""
    found = []
    widths = (96,) if size == "small" else (96, 7168)
    for D in widths:
        for name, family in families.FAMILIES.items():
            for N, T in ((1, 5), (8, 3)) if size == "small" else ((1, 129), (4, 1), (8, 65), (16, 3)):
                make = partial(_case, name, N, T, D)
                found.append(Case(f"{name}/N{N}-T{T}-D{D}", family.group, make, {"h": 4e-3, "normed": 6e-3}))
    return found


def _case(family: str, N: int, T: int, D: int, device: Any, seed: int) -> dict[str, Any]:
    return {**families.make(family, N, T, D, device=device, seed=seed), "eps": 1e-5, "norm_eps": 1e-5, "return_h": True}
