"""``rayagi export-policy``: write a policy as ONNX or as a program of torch.export."""

from __future__ import annotations

import argparse
import json
from shlex import quote

from rayagi.cli.output import say
from rayagi.run.quantities import bytes_text
from rayagi.serving.deployment import INPUTS, OUTPUTS, export_policy
from rayagi.serving.source import saved_policy


def run(arguments: argparse.Namespace) -> int:
    """Export; returns the exit code."""
    saved = saved_policy(arguments.run, arguments.checkpoint, trust_modules=arguments.trust_modules)
    for reason in saved.damaged:
        say(f"{reason}; using {saved.checkpoint}.")
    out = arguments.out
    export_policy(saved, out)
    obs_dim, state_dim, action = saved.info.obs_dim, saved.policy.state_dim, saved.info.action
    sizes = [(INPUTS[0], str(obs_dim)), *([(INPUTS[1], str(state_dim))] if state_dim else [])]
    inputs = " and ".join(f"{name} (rows, {size})" for name, size in sizes)
    outputs = f"{OUTPUTS[0]} ({', '.join(['rows', *map(str, action.shape)])})"
    if state_dim:
        outputs += f" and {OUTPUTS[1]}, which are zeros before an episode's first step"
    say(
        f"{out}: {saved.info.env_id}, {saved.checkpoint}, {bytes_text(out.stat().st_size)}: {inputs} to {outputs}"
    )
    name = json.dumps(str(out))
    if out.suffix == ".onnx":
        given = ", ".join(f'"{name}": numpy.zeros((1, {size}), "float32")' for name, size in sizes)
        code = f"import numpy, onnxruntime as o; print(o.InferenceSession({name}).run(None, {{{given}}}))"
    else:
        given = ", ".join(f"torch.zeros(1, {size})" for _, size in sizes)
        code = f"import torch; print(torch.export.load({name}).module()({given}))"
    say(f"\nNext:\n  python -c {quote(code)}")
    return 0
