"""vLLM's classes decode a server's events and encode them to the same bytes. Needs an environment
with vLLM (any build); $TERRACE names the program."""

import sys
import time
from pathlib import Path

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

sys.path.insert(0, str(Path(__file__).parent.parent / "clients"))
sys.path.insert(0, str(Path(__file__).parent))
from check_dynamo import PAGE, ask, free_port, post  # noqa: E402
from server import metric, server  # noqa: E402

END = (-1).to_bytes(8, "big", signed=True)


def told(replay):
    """Returns all events of a server's history, requested as in vLLM's example for subscribers."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.connect(replay)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    while True:
        empty, topic, seq, payload = socket.recv_multipart()
        if seq == END:
            return
        assert (empty, topic) == (b"", b"kv@pod-1@model"), (empty, topic)
        yield int.from_bytes(seq, "big"), payload


def main():
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    arguments = ["--kv-events", events, "--kv-events-replay", replay]
    arguments += ["--kv-events-topic", "kv@pod-1@model"]
    sizes = ["--device-memory", "8MiB", "--host-memory", "8MiB"]
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
    with server(*arguments, sizes=sizes) as address:
        subscriber.connect(events)
        while metric(address, "terrace_kv_event_subscribers") < 1:
            time.sleep(0.05)
        time.sleep(0.5)
        for number in range(20):
            ask(address, [number] * 9 * PAGE + [1], "salt" if number % 5 == 4 else "")
        post(f"{address}/reset_prefix_cache", {})
        ask(address, [7] * 2 * PAGE)
        batches = list(told(replay))
        assert [seq for seq, _ in batches] == list(range(len(batches))), "numbers without gaps"
        live = []
        while subscriber.poll(500):
            live.append(subscriber.recv_multipart())
        assert live, "nobody told anything"
        by_number = dict(batches)
        for _, seq, payload in live:
            assert by_number.get(int.from_bytes(seq, "big"), payload) == payload
    decoder, encoder = msgspec.msgpack.Decoder(KVEventBatch), msgspec.msgpack.Encoder()
    kinds, salted = {}, 0
    for _, payload in batches:
        batch = decoder.decode(payload)
        assert encoder.encode(batch) == payload, "vLLM would have written other bytes"
        for event in batch.events:
            kinds[type(event)] = kinds.get(type(event), 0) + 1
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                salted += event.extra_keys is not None and list(event.extra_keys[0]) == ["salt"]
    assert set(kinds) == {BlockStored, BlockRemoved, AllBlocksCleared} and salted, (kinds, salted)
    print(f"vLLM reads {len(batches)} batches and would have written the same bytes")


if __name__ == "__main__":
    main()
