"""An address at which harnesses call the policy: vLLM's server, behind a check of who asks."""

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import socket
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from verl_like.secret_values import MASK
from verl_like.workers.agents.chat import ChatFormat
from verl_like.workers.agents.engine_client import Access, Call, EngineClient, current_call
from verl_like.workers.agents.session import Session
from verl_like.workers.config.models import ModelConfig

HOST = "127.0.0.1"
MODEL_NAME = "policy"
REWARD_PATH = "/reward"
ROUTES = (
    "GET /v1/models",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/completions",
    "POST /inference/v1/generate",
    f"POST {REWARD_PATH}",
)
SERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "logprobs": (False, True),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "prompt_logprob_token_ids": (),
    "logprob_token_ids": (),
}
"""Settings with which a request asks for more than a response and the log-probabilities of its
tokens, and their values that do not."""
HELD = ("thread", "previous_response_id", "conversation")
"""Settings by which a request leaves out messages that a server has kept. None are kept here."""
IGNORED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "response_format",
    "structured_outputs",
    "thinking_token_budget",
)
"""Settings of sampling in whose place those of the configuration count."""
_NO_LIMIT = 2**31 - 1
"""The length of a prompt that vLLM allows. How long it may be is the session's."""
_TASKS: Any = ("generate",)


class PostedReward(BaseModel):
    """The body of a request to the reward route."""

    model_config = ConfigDict(strict=True)

    reward: FiniteFloat | list[FiniteFloat]


class Refused(Exception):
    """A request gets an error of HTTP, and vLLM's server does not see it."""

    def __init__(self, status: int, text: str, code: str = "") -> None:
        """Args:
        code: what some clients know an error by.
        """
        self.status = status
        self.code = code
        super().__init__(text)


class Endpoint:
    """Serves the policy to harnesses on this machine, as an application by the protocol ASGI.

    An episode has a secret, which is part of its address or the header `X-Session-ID`. The server
    runs on the event loop of the episodes: one thread uses the sessions, and it is not the main
    thread, in which uvicorn would take the signals.
    """

    def __init__(self, chat: ChatFormat, model: ModelConfig, *, port: int) -> None:
        """Takes a port of this machine, any free one for 0. Raises ValueError if it is taken."""
        self.chat = chat
        self.model = model
        self.api_key = secrets.token_urlsafe(32)
        self.reward_key = secrets.token_urlsafe(32)
        self._socket = listen(port)
        self._accesses: dict[bytes, Access] = {}
        """By digests of their secrets."""

    async def start(self) -> None:
        """Makes vLLM's server and begins to answer."""
        import uvicorn

        level = logging.root.level
        self.app = await self._make_app()
        logging.root.setLevel(level)  # a package of vLLM's server changes it when it is imported
        logging.getLogger("uvicorn.access").disabled = True  # its lines have secrets
        config = uvicorn.Config(
            self, lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        self.app.state.server = server  # vLLM ends it if the engine has died
        self._serving = asyncio.create_task(server.serve([self._socket]))

    async def close(self) -> None:
        self.app.state.server.should_exit = True
        await self._serving

    def open(self, session: Session) -> Access:
        """Gives an episode access to the model."""
        port = self._socket.getsockname()[1]
        access = Access(session, self.chat, f"http://{HOST}:{port}")
        self._accesses[_digest(access.secret)] = access
        return access

    def forget(self, access: Access) -> None:
        """Ends the access of an episode."""
        access.close()
        del self._accesses[_digest(access.secret)]

    async def _make_app(self) -> Any:
        """Returns vLLM's server, whose engine is our client."""
        from vllm.config import DeviceConfig, VllmConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.renderers.hf import HfRenderer
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        args.model = self.model.expanded_path
        args.trust_remote_code = self.model.trust_remote_code
        args.served_model_name = [MODEL_NAME]
        args.generation_config = "vllm"
        args.default_chat_template_kwargs = self.chat.template_kwargs
        args.enable_auto_tool_choice = True
        args.tool_call_parser = self.chat.tool_parser
        args.structured_outputs_config.reasoning_parser = self.chat.reasoning_parser or ""
        args.enable_scale_out = True
        model_config = AsyncEngineArgs.from_cli_args(args).create_model_config()
        # It computes nothing.
        config = VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu"))
        model_config.max_model_len = _NO_LIMIT
        # The parsers of the app read a call that has to be one as any other: no grammar makes it
        # a list in JSON.
        self.chat.parser_class.tool_parser_cls.supports_required_and_named = False
        renderer = HfRenderer(config, self.chat.tokenizer)
        client: Any = EngineClient(config, renderer, self.chat)
        app = build_app(args, _TASKS, model_config)
        await init_app_state(client, app.state, args, _TASKS)
        return app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        request = Request(scope, receive)
        try:
            access, path = self._admitted(request)
            body = await request.body()
            if path == REWARD_PATH:
                self._take_reward(access, request, body)
                await JSONResponse({})(scope, receive, send)
                return
            if sets_sampling(body):
                access.session.counts["ignored_sampling"] += 1
        except Refused as refusal:
            error = {
                "message": str(refusal),
                "type": "invalid_request_error",
                "details": {"error_code": refusal.code},
            }
            content = {"type": "error", "error": error}
            await JSONResponse(content, refusal.status)(scope, receive, send)
            return
        bodies = [body]

        async def receive_again() -> Any:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            return await receive()

        current_call.set(Call(access))
        inner = {**scope, "path": path, "raw_path": path.encode()}
        await self.app(inner, receive_again, send)

    def _admitted(self, request: Any) -> tuple[Access, str]:
        """Returns whose request it is, and its path at vLLM's server. Raises Refused if there is no
        such route or access."""
        headers = request.headers
        path = request.scope["path"]
        secret = headers.get("x-session-id", "")
        if path.startswith("/s/"):
            secret, _, path = path.removeprefix("/s/").partition("/")
            path = f"/{path}"
        if f"{request.method} {path}" not in ROUTES:
            raise Refused(404, f"There is no such route: use one of {', '.join(ROUTES)}.")
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        key = headers.get("x-api-key") or bearer
        if not _equal(key, self.api_key):
            raise Refused(401, "The key is missing or wrong: send the api_key of the run.")
        access = self._accesses.get(_digest(secret))
        if access is None:
            raise Refused(
                403,
                "The secret is missing or wrong, or its episode has ended: use the base_url of an "
                "episode until it ends, or send its secret as X-Session-ID.",
            )
        return access, path

    def _take_reward(self, access: Access, request: Any, body: bytes) -> None:
        key = request.headers.get("x-reward-key", "")
        if not _equal(key, self.reward_key):
            raise Refused(403, "X-Reward-Key is missing or wrong: send what reward_key() returns.")
        if access.reward is not None:
            raise Refused(409, "This episode has a reward already: send one.")
        try:
            access.reward = PostedReward.model_validate_json(body).reward
        except ValidationError as error:
            text = f'Send {{"reward": a finite number, or a list of such}}: {error}'
            access.reward_problem = text
            raise Refused(400, text) from None


def sets_sampling(body: bytes) -> bool:
    """Returns whether a request sets sampling, which is ignored. Raises Refused if it asks for what
    is not served."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return False  # vLLM says what is wrong
    if not isinstance(fields, dict):
        return False
    settings = list(fields.items())
    inner = fields.get("sampling_params")
    if isinstance(inner, dict):
        settings += inner.items()
    for name, value in settings:
        if name in SERVED and value not in (None, *SERVED[name]):
            raise Refused(
                400,
                f"{name}={value!r:.100} is not served: a request gets one response, and at most "
                f"the log-probabilities of its tokens. Leave {name} out.",
            )
        if name in HELD and value:
            raise Refused(
                400,
                f"{name}={value!r:.100} is not served, because no messages are kept between "
                "requests: send all of them each time.",
                "thread_unsupported_request",  # Anthropic's clients then do so
            )
    return any(name in IGNORED and value is not None for name, value in settings)


def without_secrets(text: str, base_url: str, *keys: str) -> str:
    """Returns a text in which the secret of an episode's address and some keys are masked."""
    for secret in (base_url.split("/")[-2], *keys):
        text = text.replace(secret, MASK)
    return text


def listen(port: int) -> socket.socket:
    """Takes a port of the loopback address, any free one for 0. Raises ValueError if it is
    taken."""
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"agent.port leads to port {port}, which cannot be taken: {error}. Choose another, or "
            "0 for any free one."
        ) from error


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())
