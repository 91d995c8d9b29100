"""`python -m router.text.grammar_child`: checks grammars for the router, in a process that may be killed.

Compiling a grammar that a client chose may take any time and memory, in code that neither Python nor a limit of
llguidance can interrupt. It says in a line that it is ready; then one JSON object per line comes in, and one goes out;
see `router.text.grammar_checker`.
"""

import ctypes
import json
import resource
import signal
import sys
import time

from common.errors import InvalidRequestError
from router.text.grammar import grammar_of_response_format, grammar_of_structured_outputs

#: A grammar that needs more is refused. Those of people need about a tenth of it; each worker compiles it once more.
MAX_CPU_S = 0.5

#: Address space; the libraries alone take about a quarter of it.
MAX_MEMORY_BYTES = 2 * 2**30

#: What one question may take before the kernel ends this process: the router gives up earlier, if it still lives.
KILL_AFTER_CPU_S = 30

#: prctl(PR_SET_PDEATHSIG, signal), Linux.
_PR_SET_PDEATHSIG = 1

_CHECKS = {
    "structured_outputs": grammar_of_structured_outputs,
    "response_format": grammar_of_response_format,
}


def answer(line: str) -> dict[str, str | None]:
    """Of one request `{"param", "fields", "max_bytes"}`: `{"grammar"}`, or `{"message", "param"}` of the refusal."""
    request = json.loads(line)
    begun = time.process_time()
    try:
        grammar = _CHECKS[request["param"]](request["fields"], max_bytes=request["max_bytes"])
    except InvalidRequestError as error:
        return {"message": error.message, "param": error.param}
    if time.process_time() - begun > MAX_CPU_S:
        return {"message": f"{request['param']}: takes too long to compile; make it simpler", "param": request["param"]}
    return {"grammar": grammar}


def main() -> None:
    """Until the router closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        limit = int(time.process_time()) + KILL_AFTER_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        sys.stdout.write(json.dumps(answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
