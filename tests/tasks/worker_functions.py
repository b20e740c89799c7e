"""What test_worker.py has called in another process."""

import os
import time


def add(x, y):
    return x + y


def divide(x, y):
    return x / y


def compute(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass
    return time.process_time() - start


def compute_for_ever():
    while True:
        pass


def compute_for_ever_in_c():
    return 9**9**9


def wait_for_ever():
    time.sleep(1e6)


def refuse(reason):
    raise ValueError(reason)


def leave(code):
    os._exit(code)
