"""A plugin of pytest: the outcome of each test becomes a line of the results."""

import pytest
import results

LONGEST = 4000  # characters of a failure's report


class Recorder:
    """Records what the process that collects the reports sees; with xdist that is the controller."""

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        said = ""
        if report.failed:
            said = str(report.longrepr)[-LONGEST:]
        elif report.skipped:
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        found = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3), "said": said}
        results.append("test", found)

    def pytest_collectreport(self, report):
        if report.failed:
            results.append(
                "test", {"test": report.nodeid, "outcome": "failed", "said": str(report.longrepr)[-LONGEST:]}
            )


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if not hasattr(session.config, "workerinput"):
        results.append("session", {"tests": session.testscollected, "exit": int(exitstatus)})
