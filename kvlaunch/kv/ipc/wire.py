"""Bytes on the wire: one encoder, one typed decoder for each direction. MessagePack, never pickle."""

from __future__ import annotations

import msgspec

from kvlaunch.kv.ipc.messages import Hello, HelloRequester, RankResult, RankState, Reply, Request, Welcome

MAX_MESSAGE = 1 << 20
"""Bytes of the largest message that a listener takes."""

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_result = msgspec.msgpack.Decoder(RankResult).decode
decode_state = msgspec.msgpack.Decoder(RankState).decode
decode_hello = msgspec.msgpack.Decoder(Hello | HelloRequester).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
DecodeError = msgspec.DecodeError
"""What the decoders raise for bytes that are not such a message (msgspec.ValidationError is one)."""
