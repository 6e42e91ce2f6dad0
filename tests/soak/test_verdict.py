# SPDX-License-Identifier: Apache-2.0
"""What the verdict says of samples of known servers."""

import random

import pytest
from verdict import LATENCY_FACTOR, MEBIBYTE, Latency, Sample, judge, slope

SECONDS = 1000.0


def samples(memory=lambda t: 100 * MEBIBYTE, descriptors=lambda t: 40, threads=lambda t: 30, kill_at=()):
    """One a second. The server begins again at the times `kill_at`, with memory that it takes in the next minute."""
    made = []
    for t in range(int(SECONDS)):
        begins = [0.0, *(at for at in kill_at if at <= t)]
        young = max(0.0, 1 - (t - begins[-1]) / 60)
        made.append(Sample(t, len(begins), int(memory(t) - 50 * MEBIBYTE * young), int(descriptors(t)), int(threads(t))))
    return made


def latencies(seconds=lambda t: 0.01, control=lambda t: 0.002):
    return [Latency(t, seconds(t), control(t)) for t in range(int(SECONDS))]


def failed(samples, latencies):
    return {finding.what for finding in judge(samples, latencies, SECONDS) if not finding.passed}


def test_a_level_server_passes():
    rng = random.Random(1)
    noisy = samples(memory=lambda t: (100 + rng.gauss(0, 0.2)) * MEBIBYTE, descriptors=lambda t: 40 + rng.randrange(20),
                    threads=lambda t: 30 + rng.randrange(3), kill_at=(50, 100, 150, 180))
    assert failed(noisy, latencies(lambda t: rng.expovariate(100))) == set()


@pytest.mark.parametrize("what, grows", [
    ("steady memory", {"memory": lambda t: (100 + t / 80) * MEBIBYTE}),  # 9.4 MiB in 750 s
    ("descriptors", {"descriptors": lambda t: 40 + t / 80}),
    ("threads", {"threads": lambda t: 30 + t / 150}),
])
def test_what_grows_is_found(what, grows):
    assert failed(samples(**grows), latencies()) == {what}


def test_steps_of_memory_are_no_steady_growth():
    steps = samples(memory=lambda t: (100 + 10 * (t > 400) + 6 * (t > 800)) * MEBIBYTE)
    assert failed(steps, latencies()) == set()
    assert failed(samples(memory=lambda t: (100 + t // 10) * MEBIBYTE), latencies()) == {"memory", "steady memory"}


def test_messages_under_way_are_no_growth():
    """Samples that are often tens of MiB above a level floor, and the same above one that rises."""
    for seed in range(20):
        rng = random.Random(seed)
        def under_way(floor):
            return lambda t: (floor(t) + (rng.random() < 0.3) * rng.uniform(0, 40)) * MEBIBYTE
        assert failed(samples(memory=under_way(lambda t: 100)), latencies()) == set()
        assert "steady memory" in failed(samples(memory=under_way(lambda t: 100 + t / 25)), latencies())


def test_memory_that_is_given_back_is_no_growth():
    """It rises by 6 MiB in 10 s, is given back, and so on."""
    def sawtooth(floor):
        return lambda t: (floor(t) + 0.6 * (t % 10)) * MEBIBYTE
    assert failed(samples(memory=sawtooth(lambda t: 100)), latencies()) == set()
    rising = sawtooth(lambda t: 100 + t / 40)  # 18.75 MiB in 750 s
    assert failed(samples(memory=rising), latencies()) == {"steady memory"}


def test_what_grows_is_found_over_restarts():
    """A leak that each restart of the server undoes: no sample is ever above the first process's last one."""
    kills = (200, 400, 600, 800)
    since = [0.0, *kills]
    leak = [Sample(t, sum(at <= t for at in kills), int((100 + (t - max(s for s in since if s <= t)) / 20) * MEBIBYTE), 40, 30)
            for t in range(int(SECONDS))]
    assert failed(leak, latencies()) == {"steady memory"}


def test_a_leak_is_found_in_a_short_run():
    """30 s, in which hundreds of MiB come and go beside a leak: the parts of the time are too short to show a slope."""
    for seed in range(20):
        rng = random.Random(seed)
        short = [Sample(t / 10, 0, int((700 + t + rng.uniform(0, 300)) * MEBIBYTE), 40, 30) for t in range(300)]
        assert "steady memory" in {finding.what for finding in judge(short, latencies(), 30) if not finding.passed}


def test_growth_in_the_first_third_does_not_count():
    assert failed(samples(memory=lambda t: (100 + min(t, 320)) * MEBIBYTE), latencies()) == set()


def test_latency_is_compared_by_medians():
    assert failed(samples(), latencies(lambda t: 0.01 if t < 800 else 0.05)) == {"latency"}
    slower = latencies(lambda t: 0.01 if t < 800 else 0.05, lambda t: 0.002 if t < 800 else 0.01)  # the machine is
    assert failed(samples(), slower) == set()
    assert failed(samples(), latencies(lambda t: 0.01 * (1 + 0.9 * (LATENCY_FACTOR - 1) * (t > 800)))) == set()
    assert failed(samples(), latencies(lambda t: 5.0 if t % 3 == 0 and t > 600 else 0.01)) == set()  # rare and slow


def test_too_few_samples_do_not_pass():
    assert failed(samples()[:10], latencies()) == {"samples"}
    assert failed(samples(), latencies()[:300]) == {"latency"}


def test_slope_of_groups():
    assert slope([(0, 0, 5), (0, 1, 7), (1, 0, 100), (1, 1, 102)]) == pytest.approx(2)
    assert slope([(0, 1, 5)]) == 0
