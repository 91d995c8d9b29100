"""What handlers find in the application, typed."""

from dataclasses import dataclass

from aiohttp import web

from common.config import RouterSettings
from common.security.tls import ServerTls
from common.tracing import Tracing
from router.fleet import Fleet
from router.json_body import UnknownFields
from router.live import LiveRequests
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.processes.counter_memory import CounterMemory
from router.processes.siblings import Siblings
from router.text.chat import ChatTemplate
from router.text.grammar_checker import GrammarChecker
from router.text.tokenizer import Tokenizer
from router.validate import Planner


@dataclass(frozen=True, slots=True)
class ServedModel:
    """How the model is called, and where it came from."""

    name: str
    root: str | None
    created: int


@dataclass(frozen=True, slots=True)
class TextTools:
    """What a checkpoint says about text; None where it says nothing."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


SETTINGS = web.AppKey("settings", RouterSettings)
#: None: plain HTTP. Not there in the application that router processes talk through.
TLS = web.AppKey("tls", ServerTls)
MODEL = web.AppKey("model", ServedModel)
FLEET = web.AppKey("fleet", Fleet)
LIVE = web.AppKey("live", LiveRequests)
PLANNER = web.AppKey("planner", Planner)
GRAMMARS = web.AppKey("grammars", GrammarChecker)
PIPELINE = web.AppKey("pipeline", Pipeline)
TEXT = web.AppKey("text", TextTools)
#: What the metrics are counted in.
COUNTERS = web.AppKey("counters", CounterMemory)
METRICS = web.AppKey("metrics", RouterMetrics)
TRACING = web.AppKey("tracing", Tracing)
DOCUMENT = web.AppKey("document", str)
DOCS_PAGE = web.AppKey("docs_page", str)
SIBLINGS = web.AppKey("siblings", Siblings)
UNKNOWN_FIELDS = web.AppKey("unknown_fields", UnknownFields)


def share(public: web.Application, app: web.Application) -> None:
    """Once `app` starts, it has all that `public` has and itself has not; `public` must have started by then."""

    async def take_over(app: web.Application) -> None:
        for key in public:
            if key not in app:
                app[key] = public[key]

    app.on_startup.append(take_over)


def max_model_len(app: web.Application) -> int | None:
    """The served model's context; None before any worker has answered."""
    known = app[FLEET].known_model()
    return known.max_model_len if known else None
