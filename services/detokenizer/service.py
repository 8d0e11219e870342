"""The detokenizer's messages: requests and tokens in, text out to the gateways."""

from __future__ import annotations

from collections.abc import Iterable

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.decoder import Decoders
from services.detokenizer.metrics import DetokenizerCollector
from services.detokenizer.outbox import Outgoing
from services.detokenizer.undelivered import Undelivered
from shared.codec import Identity
from shared.mesh import Mesh
from shared.messages import Abort, Failed, Message, Open, StepResult
from shared.model import read_model_info
from shared.service import Service
from shared.settings import BadSetting, Settings, model_path
from shared.types import ServiceName


class DetokenizerService(Service):
    """One shard: the requests that the gateways route here."""

    service = ServiceName.DETOKENIZER
    talks_to = frozenset({ServiceName.GATEWAY, ServiceName.SCHEDULER})

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        """Loads the tokenizer: nothing can be taken in before that, so the inbox opens after it."""
        super().__init__(settings, mesh)
        path = model_path(settings)
        try:
            model = read_model_info(path, max_model_len=1)  # how long it is matters to others
            self._core = DetokenizerCore(Decoders(path), model.eos_token_ids)
        except ValueError as error:
            raise BadSetting(f"--model: {error}") from error
        self._undelivered = Undelivered()
        self.registry.register(DetokenizerCollector(self._core))

    @property
    def busy(self) -> bool:
        return self._core.num_open > 0

    def handle(self, message: Message, sender: Identity) -> None:
        match message:
            case StepResult():
                self._send(self._core.step(message))
            case Open():
                self._send(self._core.open(message, sender))
            case Abort():
                self._core.abort(message.request_id)
            case Failed():
                self._send(self._core.failed(message))

    def peer_joined(self, service: ServiceName, name: str) -> None:
        for message in self._undelivered.claim(service, name):
            self.mesh.send(service, name, message)

    def peer_lost(self, service: ServiceName, name: str) -> None:
        self._undelivered.claim(service, name)
        if service is ServiceName.SCHEDULER:
            self._send(self._core.scheduler_lost(name))
        elif service is ServiceName.GATEWAY:
            self._send(self._core.gateway_lost(name))

    def _send(self, outgoing: Iterable[Outgoing]) -> None:
        for service, name, message in outgoing:
            if not self.mesh.send(service, name, message):
                self._undelivered.keep(service, name, message)
