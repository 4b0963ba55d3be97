"""``rayagi policy-server``: serve a policy's actions to external robots and games."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from pathlib import Path

from placement.errors import counted
from rayagi.cli.failures import UsageError
from rayagi.cli.output import say
from rayagi.run.versions import usable_cores
from rayagi.serving.policy_server.served_policy import ServedPolicy
from rayagi.serving.policy_server.server import PolicyServer, ServerSettings, is_loopback


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted; returns the exit code."""
    if arguments.port is None and arguments.unix is None:
        raise UsageError("where should it listen? Give --port P, --unix PATH, or both")
    if arguments.threads > usable_cores():
        raise UsageError(
            f"--threads {arguments.threads}: this process may use {counted(usable_cores(), 'core')}; give fewer"
        )
    given = None if arguments.token_file is None else _read_token(arguments.token_file)
    policy = ServedPolicy(arguments.run, arguments.checkpoint, trust_modules=arguments.trust_modules)
    for reason in policy.saved.damaged:
        say(f"{reason}; using {policy.saved.checkpoint}.")
    info = policy.info()
    what = f"{counted(info['obs_dim'], 'observation')}, {counted(policy.saved.info.action.dim, 'action')}"
    say(f"{info['task']}, {info['checkpoint']} ({policy.saved.env_steps:,} environment steps): {what}")
    settings = ServerSettings(
        host=arguments.host,
        port=arguments.port,
        unix=arguments.unix,
        token=given or _token(arguments),
        max_rows=arguments.max_rows,
        threads=arguments.threads,
        follow=arguments.follow,
    )
    asyncio.run(_serve(policy, settings))
    return 0


async def _serve(policy: ServedPolicy, settings: ServerSettings) -> None:
    server = PolicyServer(policy, settings, say)
    await server.run()
    done = server.statistics
    say(
        f"{counted(done.requests, 'request')} ({counted(done.rows, 'observation')}) "
        f"in {counted(done.batches, 'batch', 'batches')}, {done.refused:,} refused"
    )
    say(f"latency in the server: {done.latency.text()}")


def _token(arguments: argparse.Namespace) -> str | None:
    """Access token of HTTP clients; a new one if other hosts can reach the server."""
    if arguments.port is None or is_loopback(arguments.host):
        return None
    token = secrets.token_urlsafe(24)
    say(f"token (shown once; clients send 'Authorization: Bearer TOKEN'): {token}")
    return token


def _read_token(path: Path) -> str:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(
            f"--token-file {path}: {reason}; give a file whose first line is the token"
        ) from error
    token = lines[0].strip() if lines else ""
    if len(token) < 16:
        raise UsageError(f"--token-file {path}: its first line is the token, of 16 characters at least")
    if not (token.isascii() and token.isprintable()):
        raise UsageError(f"--token-file {path}: the token is not printable ASCII, and clients cannot send it")
    return token
