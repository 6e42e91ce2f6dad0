# SPDX-License-Identifier: Apache-2.0
"""The protocol of the version before (tests/proto/previous): its messages, and a server that knows no more of them.

The messages live in a pool of their own, beside today's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "lossd.v1"
FILES = descriptor_pb2.FileDescriptorSet.FromString(
    Path(__file__).parents[2].joinpath("proto", "previous", "protocol.binpb").read_bytes())
_POOL = descriptor_pool.DescriptorPool()
for _file in FILES.file:  # in the order in which they need each other
    _POOL.Add(_file) if hasattr(_POOL, "Add") else _POOL.AddSerializedFile(_file.SerializeToString())


def message(name: str) -> Any:
    """The class of a message, by its name within the package."""
    descriptor = _POOL.FindMessageTypeByName(f"{PACKAGE}.{name}")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(_POOL).GetPrototype(descriptor)


def _services() -> dict[str, Any]:
    return {f"/{PACKAGE}.{service.name}/{method.name}": method for file in FILES.file if file.package == PACKAGE
            for service in file.service for method in service.method}


METHODS = _services()


def stub(channel: grpc.Channel, method: str) -> Callable[..., Any]:
    """A call of `Service/Method` with messages of the version before."""
    path = f"/{PACKAGE}.{method}"
    described = METHODS[path]
    arity = f"{'stream' if described.client_streaming else 'unary'}_{'stream' if described.server_streaming else 'unary'}"
    answer = message(described.output_type.rsplit(".", 1)[1])
    return getattr(channel, arity)(path, request_serializer=lambda request: request.SerializeToString(),
                                   response_deserializer=answer.FromString)


class PreviousServer(grpc.GenericRpcHandler):
    """Stands before a server of today and makes it one of the version before: what that did not know is removed from requests and
    answers, and a method that it did not have is unknown. `removed` counts messages that lost something, by method."""

    def __init__(self, target: str) -> None:
        self.removed: dict[str, int] = {}
        self._channel = grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)])
        self._server = grpc.server(futures.ThreadPoolExecutor(32), handlers=[self],
                                   options=[("grpc.max_receive_message_length", -1)])
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._channel.close()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if call.method not in METHODS:
            return None  # UNIMPLEMENTED
        described = METHODS[call.method]
        request, answer = (message(name.rsplit(".", 1)[1]) for name in (described.input_type, described.output_type))

        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            forward = self._channel.stream_stream(call.method)(
                (self._known(call.method, request, each) for each in requests), timeout=context.time_remaining(),
                metadata=[pair for pair in context.invocation_metadata() if not pair[0].startswith(("user-agent", "grpc-", "te"))])
            context.add_callback(forward.cancel)
            try:
                for each in forward:
                    yield self._known(call.method, answer, each)
            except grpc.RpcError as error:
                context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
                context.abort(error.code(), error.details())

        # On the wire a call with one message is a stream of one.
        return grpc.stream_stream_rpc_method_handler(serve)

    def _known(self, method: str, kind: Any, data: bytes) -> bytes:
        parsed = kind.FromString(data)
        parsed.DiscardUnknownFields()
        known: bytes = parsed.SerializeToString()
        if len(known) < len(data):
            self.removed[method] = self.removed.get(method, 0) + 1
        return known
