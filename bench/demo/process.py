"""Runs one job in a process of its own, shows its progress, and keeps what the engine prints.

An engine owns signal handlers, environment variables and child processes; a fresh process for
each keeps them apart, and only one exists at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from tqdm import tqdm

from bench.demo.measure import count_steps, measure
from bench.demo.records import EngineRun, Job

_LOG_LINES_SHOWN = 30


class EngineRunError(RuntimeError):
    """An engine run that did not finish; the message says where its log is and how it ends."""


def run_job(title: str, job: Job, log_path: Path) -> EngineRun:
    """Run a job in a new process and wait for it.

    Raises:
        EngineRunError: the engine could not be started or died.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(job, sender, str(log_path)))
    process.start()
    sender.close()
    result: EngineRun | None = None
    # No estimate of the time left: the first steps start an engine and say little about the rest.
    form = "{desc}: {n_fmt}/{total_fmt} {bar} [{elapsed}]{postfix}"
    with tqdm(total=count_steps(job), desc=title, bar_format=form, mininterval=0) as bar:
        bar.set_postfix_str("starting SGLang")
        try:
            while result is None:
                message = receiver.recv()
                if isinstance(message, EngineRun):
                    result = message
                else:
                    bar.set_postfix_str(message, refresh=False)
                    bar.update()
        except EOFError:
            pass  # The process ended without a result; its log says why.
        except BaseException:
            process.terminate()
            raise
        finally:
            process.join()
    if result is None:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:])
        raise EngineRunError(
            f"the engine run {title!r} ended with exit code {process.exitcode} before its "
            f"measurements were complete. The end of {log_path}:\n{tail}"
        )
    return result


def _main(job: Job, sender: Connection, log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        sender.send(measure(job, sender.send))
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
