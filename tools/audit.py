"""Looks for known vulnerabilities in what deploy/requirements*.txt lock, with pip-audit.

python tools/audit.py

A service counts as reached if it tells of a vulnerability that it must know. With none reached, one
line says so and the exit code is 0; that takes 16 s at most. With one reached, the code is 0 only
if it has answered for each locked package and knows of nothing against it: an audit that breaks off
could have lost a finding.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from typing import Any

from lock import BUILD_LOCK, DEMO_LOCK, ROOT, read

SERVICES = ("osv", "pypi")
"""Of pip-audit, in the order in which they are tried."""
CANARY = {"jinja2": "2.10"}
"""What every service must know to be vulnerable (CVE-2019-10906); nothing installs it."""
REQUEST_TIMEOUT_S = 8
CANARY_TIMEOUT_S = 24
AUDIT_TIMEOUT_S = 60
"""For a lock, one question a package."""
ACCEPTED: dict[str, str] = {}
"""Findings that don't fail the audit: by their ids, why they can do no harm here."""
UNREACHED = (
    "requests.exceptions.",
    "VulnServiceConnectionError",
    "ServiceError",
    "your network may be blocking",
)
"""Of which pip-audit says one when a service gives no answer, or none that can be read."""


class BrokenOffError(Exception):
    """An audit without a result; says why."""


def audit(service: str, versions: dict[str, str], timeout_s: float) -> dict[str, list[str]]:
    """What a service knows of packages.

    Args:
        service: One of SERVICES.
        versions: By package.
        timeout_s: For all of it.

    Returns:
        By each package for which it answered, its vulnerabilities, a line each.

    Raises:
        BrokenOffError: it did not come to an end.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in versions.items())
        file.flush()
        command = [
            *(sys.executable, "-m", "pip_audit", f"--requirement={file.name}"),
            *("--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off"),
            *(f"--vulnerability-service={service}", f"--timeout={REQUEST_TIMEOUT_S}"),
            *(f"--ignore-vuln={accepted}" for accepted in ACCEPTED),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise BrokenOffError(f"requests.exceptions.Timeout: {timeout_s} s") from None
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
        return {
            each["name"]: [
                f"{each['name']} {each['version']}: {vulnerability['id']}, mended in "
                f"{', '.join(vulnerability['fix_versions']) or 'no version'}"
                for vulnerability in each["vulns"]
            ]
            for each in packages
            if "skip_reason" not in each
        }
    except (ValueError, KeyError, TypeError):
        raise BrokenOffError(done.stderr.strip() or f"exit code {done.returncode}") from None


def is_reached(service: str) -> bool:
    """Whether a service tells what it must know.

    Raises:
        BrokenOffError: pip-audit failed, and not for want of an answer.
    """
    try:
        return any(audit(service, CANARY, CANARY_TIMEOUT_S).values())
    except BrokenOffError as error:
        if any(words in str(error) for words in UNREACHED):
            return False
        raise


def main() -> int:
    """See the module; returns the exit code."""
    if importlib.util.find_spec("pip_audit") is None:
        print("audit: pip-audit is not installed: make setup")
        return 1
    objections: list[str] = []
    count = 0
    try:
        service = next(filter(is_reached, SERVICES), None)
        if service is None:
            print(f"audit: could not look for known vulnerabilities: {' and '.join(SERVICES)}, "
                  "which would tell, are not reached from here")  # fmt: skip
            return 0
        for lock in (DEMO_LOCK, BUILD_LOCK):  # the demo's has all that the image's has
            versions = {pin.name: pin.version for pin in read(ROOT / lock)}
            answers = audit(service, versions, AUDIT_TIMEOUT_S)
            for name in versions:
                found = answers.get(name, [f"{name}: {service} gave no answer"])
                objections += [f"audit: {lock}: {each}" for each in found]
            count += len(versions)
    except BrokenOffError as error:
        objections.append(f"audit: broke off before the end: {str(error).splitlines()[-1]}")
    if objections:
        print(*objections, sep="\n")
        return 1
    print(f"audit: {service} knows of no vulnerability in {count} locked packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
