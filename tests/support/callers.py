"""Python threads that call at once."""

import threading

from subprocesses import TIMEOUT


def call_at_once(count, function):
    """function(number) in so many threads, which begin together; fails if one does not end."""
    gate = threading.Barrier(count)

    def begin(number):
        gate.wait()
        function(number)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads)
