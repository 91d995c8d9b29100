"""The aiohttp applications: routes, middleware and what lives as long as the process."""

import time
from collections.abc import AsyncIterator, Callable

import structlog
from aiohttp import web

from common.config import RouterSettings
from common.security.tls import load_tls
from common.security.watched_file import Pollable, reading
from common.tracing import open_tracing
from router.access import ACCESS, CLUSTER_KEYS, Access, load_cluster_keys
from router.auth import GUARD, Guard, expect_continue, require_key
from router.connections import FEW_CONNECTIONS, MAX_CONNECTIONS
from router.control.routes import controlling
from router.cors import CORS, Cors, add_cors_headers, answer_preflights
from router.defaults import checkpoint_folder, load_defaults
from router.docs_page import render
from router.fleet import Fleet
from router.json_body import BODY_LIMITS, BodyLimits, UnknownFields
from router.keys import (
    COUNTERS,
    DOCS_PAGE,
    DOCUMENT,
    FLEET,
    GRAMMARS,
    LIVE,
    METRICS,
    MODEL,
    PIPELINE,
    PLANNER,
    SETTINGS,
    SIBLINGS,
    TEXT,
    TLS,
    TRACING,
    UNKNOWN_FIELDS,
    ServedModel,
    TextTools,
    share,
)
from router.live import LiveRequests
from router.metrics import RouterMetrics
from router.middleware import bound_sizes, errors_as_json
from router.openapi import document, json_text
from router.pipeline import Pipeline
from router.processes.counter_memory import CounterMemory
from router.processes.leading import lead
from router.processes.siblings import Siblings
from router.sglang.ids import CHOICE_IDS, ChoiceIds
from router.surface import CONTROL, CONTROL_PATHS, PUBLIC, Surface
from router.text.chat import load_chat_template
from router.text.grammar_checker import GrammarChecker
from router.text.tokenizer import load_tokenizer
from router.validate import Planner

#: Where API keys open a part, and administrators' keys the rest.
SHARED_PATHS = frozenset({"/abort_request"})

log = structlog.get_logger()


def create_app(
    settings: RouterSettings, siblings: Siblings | None = None, counters: CounterMemory | None = None
) -> web.Application:
    """Builds the application of the HTTP port; workers are contacted when it starts.

    `siblings`, `counters`: the other processes of this router, if it has several, and what it counts in with them.

    Raises:
        ConfigError: `--model` is no local directory, its generation_config.json cannot be used, or a key file cannot.
    """
    access = Access.of(settings)
    cluster_keys = load_cluster_keys(settings)
    defaults = load_defaults(settings.model, ignore=settings.ignore_generation_config)
    surface = PUBLIC.with_control() if settings.admin_on_public_port else PUBLIC
    app = _application(
        settings, surface, Guard(access.keys, access.admin_keys, CONTROL_PATHS, SHARED_PATHS), access.cors
    )
    app[ACCESS] = access
    if tls := load_tls(settings):
        app[TLS] = tls
    if cluster_keys:
        app[CLUSTER_KEYS] = cluster_keys
    app[MODEL] = _served_model(settings)
    app[UNKNOWN_FIELDS] = UnknownFields()
    app[CHOICE_IDS] = ChoiceIds()
    app[SIBLINGS] = siblings or Siblings(0, {})
    app[COUNTERS] = counters or CounterMemory.alone()
    app[TEXT] = text = _text_tools(settings)
    app[PLANNER] = Planner(settings, defaults, text.tokenizer)
    app.cleanup_ctx.append(_tracing)
    app.cleanup_ctx.append(_serving)
    app.cleanup_ctx.append(controlling)
    return app


def create_control_app(public: web.Application) -> web.Application:
    """The application of the control port, over what the public one has; to be started after it."""
    access = public[ACCESS]
    control = _application(public[SETTINGS], CONTROL, Guard(access.admin_keys, refuses_pages=True), access.cors)
    control[MAX_CONNECTIONS] = FEW_CONNECTIONS
    share(public, control)
    if TLS in public:
        control[TLS] = public[TLS]
    return control


def _application(settings: RouterSettings, surface: Surface, guard: Guard, cors: Cors) -> web.Application:
    app = web.Application(
        middlewares=[errors_as_json, bound_sizes, answer_preflights, require_key, lead],
        client_max_size=settings.max_body_bytes,
    )
    described = document(surface.title, surface.operations, guard.needs_key)
    app[SETTINGS] = settings
    app[GUARD] = guard
    app[CORS] = cors
    app[BODY_LIMITS] = BodyLimits(settings.body_timeout_s, settings.max_body_values)
    app[DOCUMENT] = json_text(described)
    app[DOCS_PAGE] = render(described)
    if cors.enabled:
        app.on_response_prepare.append(add_cors_headers)
    app.add_routes([_checking_expectations(route) for route in surface.routes])
    return app


def _checking_expectations(route: web.RouteDef) -> web.RouteDef:
    return web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": expect_continue})


async def _tracing(app: web.Application) -> AsyncIterator[None]:
    """Raises ConfigError if traces cannot go where they should."""
    endpoint, ratio = app[SETTINGS].otlp_traces_endpoint, app[SETTINGS].trace_sample_ratio
    async with open_tracing(endpoint, ratio, service="router") as app[TRACING]:
        yield


async def _serving(app: web.Application) -> AsyncIterator[None]:
    """Channels and heartbeats, from start to stop."""
    settings = app[SETTINGS]
    keys = app.get(CLUSTER_KEYS)
    fleet = app[FLEET] = Fleet(settings, keys=keys)
    live = app[LIVE] = LiveRequests()
    app[METRICS] = RouterMetrics(lambda: len(live), fleet, app[COUNTERS], _certificates(app))
    app[PIPELINE] = Pipeline(fleet, connect_timeout_s=settings.connect_timeout_s, max_attempts=settings.max_attempts)
    certificates = app[TLS].files if TLS in app else ()
    files: list[Pollable] = [*app[ACCESS].files, *certificates, *([keys] if keys else [])]
    async with GrammarChecker(settings.max_grammar_bytes) as app[GRAMMARS], fleet.running(), reading(files):
        yield


def _certificates(app: web.Application) -> dict[str, Callable[[], float]]:
    """Of each that the router shows to others, how many seconds are left; `https` to clients, `cluster` to workers."""
    found = {}
    if CLUSTER_KEYS in app:
        keys = app[CLUSTER_KEYS]
        found["cluster"] = lambda: keys.value.seconds_left()
    if TLS in app:
        found["https"] = app[TLS].seconds_left
    return found


def _text_tools(settings: RouterSettings) -> TextTools:
    """Of the checkpoint, if the router knows one."""
    if settings.model is None:
        return TextTools(None, None)
    folder = checkpoint_folder(settings.model)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        log.warning("no_tokenizer", folder=str(folder), hint="only token ids are served")
        return TextTools(None, None)
    return TextTools(tokenizer, load_chat_template(folder, settings.chat_template, tokenizer.special_tokens))


def _served_model(settings: RouterSettings) -> ServedModel:
    folder = checkpoint_folder(settings.model).name if settings.model else "moerelay"
    return ServedModel(settings.served_model_name or folder, settings.model, int(time.time()))
