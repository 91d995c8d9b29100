"""What the tests of the pages do not run, and why; each reason is shown as that of a skipped test."""

import re

from tests.docs.blocks import Block

#: Patterns of whole blocks.
BLOCKS = [
    (r"\[--|…|\w\|\w|\b(FILE|DIR|NAME|TEXT)\b", "tells the form of a command, with placeholders"),
    (
        r"kill -TERM \$!",
        "starts clusters of its own, one after the other; tests/e2e/test_verify_matrix.py has both modes",
    ),
    (r"p0\.example|dns://|srv://", "a cluster of several machines"),
    (r"\$\(grep -m 1 \^mr- [\w-]+\.txt\)", "needs a cluster with keys; tests/unit/router/test_control_port.py has one"),
    (r"router\.example:", "asks a machine of that name; tests/unit/router/test_tls.py asks this one"),
    (r"self-check-\d", "names a file that only a failed check writes; tests/integration/test_self_check.py makes one"),
    (r"\blocust -f", "puts load on a cluster for a minute; tests/e2e/test_load.py does it for seconds"),
    (r"\bdocker(-compose)?\b", "needs a Docker engine; tests/compose has one where there is one"),
]

#: Patterns of single commands; the others of the block are run.
STATEMENTS = [
    (r"^make \w", "sets up, measures or draws in the clone itself, for minutes; CI runs these targets"),
    (r"^source \.venv/", "the tests run in that environment"),
    (r"^moerelay doctor ", "asks whether port 8000 is free; tests/unit/deploy/test_doctor.py looks at every answer"),
    (r"^(\.venv/bin/)?moerelay up ", "that cluster is running already; test_commands.py reads the flags"),
]


def why_not(block: Block) -> str | None:
    """Why nothing of the block is run; None: at least a part is."""
    for pattern, reason in BLOCKS:
        if re.search(pattern, block.text):
            return reason
    reasons = [_reason(statement) for statement in block.statements]
    return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))


def left_out(statement: str) -> bool:
    """Whether a command of a block that is run is not."""
    return _reason(statement) is not None


def _reason(statement: str) -> str | None:
    return next((reason for pattern, reason in STATEMENTS if re.search(pattern, statement)), None)
