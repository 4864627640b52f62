import asyncio
import json
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from glm_jax.tracing import Tracer


def spans_by_track(trace):
    names = {e["tid"]: e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks = {}
    for event in trace:
        if event["ph"] == "X":
            tracks.setdefault(names[event["tid"]], []).append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return tracks


def assert_nested(spans):
    """Any two spans of one track are disjoint or one holds the other: what the format can draw."""
    slack = 1e-3  # microseconds
    for a in spans:
        for b in spans:
            inside = b[0] >= a[0] - slack and b[1] <= a[1] + slack
            around = a[0] >= b[0] - slack and a[1] <= b[1] + slack
            assert inside or around or a[1] <= b[0] + slack or b[1] <= a[0] + slack


def test_every_thread_has_its_track_and_the_file_is_valid(tmp_path):
    tracer = Tracer(tmp_path / "trace.json")

    def work(name):
        for number in range(20):
            with tracer.span(name, number=number), tracer.span("inner"):
                pass

    threads = [threading.Thread(target=work, args=(f"work.{n}",), name=f"thread-{n}") for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.counter("queue", 3)
    tracer.counter("queue", float("nan"))
    tracer.instant("moment", why=threads)
    tracer.save()
    tracer.save()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]

    text = (tmp_path / "trace.json").read_text()
    trace = json.loads(text, parse_constant=lambda constant: (_ for _ in ()).throw(AssertionError(constant)))["traceEvents"]
    tracks = spans_by_track(trace)
    for n in range(4):
        assert len(tracks[f"thread-{n}"]) == 40
        assert {name for *_, name in tracks[f"thread-{n}"]} == {f"work.{n}", "inner"}
        assert_nested(tracks[f"thread-{n}"])
    assert [e["args"]["value"] for e in trace if e["ph"] == "C"] == [3.0]
    assert sum(e["ph"] == "i" for e in trace) == 1


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6))
def test_overlapping_coroutines_get_tracks_on_which_spans_nest(delays):
    tracer = Tracer()

    async def episode(steps):
        with tracer.span("actor.step"):
            for step in steps:
                with tracer.span("step"):
                    await asyncio.sleep(step / 2000)

    async def all_episodes():
        await asyncio.gather(*(episode(steps) for steps in delays))

    asyncio.run(all_episodes())
    tracks = spans_by_track(tracer.events())
    assert sum(len(spans) for spans in tracks.values()) == len(delays) + sum(map(len, delays))
    for spans in tracks.values():
        assert_nested(spans)


def test_durations_are_microseconds():
    tracer = Tracer()
    with tracer.span("sleep"):
        time.sleep(0.02)
    (span,) = [event for event in tracer.events() if event["ph"] == "X"]
    assert 20_000 <= span["dur"] < 2_000_000


def test_memory_is_bounded_and_the_newest_stay(tmp_path):
    tracer = Tracer(tmp_path / "trace.json", max_events=10)
    for number in range(25):
        with tracer.span("s", number=number):
            pass
    tracer.save()
    saved = json.loads((tmp_path / "trace.json").read_text())
    assert [e["args"]["number"] for e in saved["traceEvents"] if e["ph"] == "X"] == list(range(15, 25))
    assert saved["otherData"]["dropped_events"] == 15


def test_a_later_process_keeps_the_earlier_trace(tmp_path):
    for _ in range(3):
        tracer = Tracer(tmp_path / "trace.json")
        tracer.instant("x")
        tracer.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.1.json", "trace.2.json", "trace.json"]


def test_the_span_ends_when_its_body_fails():
    tracer = Tracer()
    try:
        with tracer.span("fails"):
            raise ValueError
    except ValueError:
        pass
    with tracer.span("next"):
        pass
    assert list(spans_by_track(tracer.events())) == [threading.current_thread().name]


def test_null_records_nothing(tmp_path):
    tracer = Tracer.null()
    with tracer.span("a", x=1):
        tracer.counter("b", 1)
        tracer.instant("c")
    tracer.save()
    assert all(event["ph"] == "M" for event in tracer.events())
