# SPDX-License-Identifier: Apache-2.0
"""What this package raises: one base class, and one class for each place where bad data can enter."""


class ReplayError(ValueError):
    """Base of all errors of this package."""


class ReplayConfigError(ReplayError):
    """Settings or a model configuration that cannot be replayed."""


class ReplayDecodeError(ReplayError):
    """Rows that are not what the spec and the tokens call for.

    Attributes:
        code: row of the validation table, such as `npy.header`, `shape.rows` or `value.range`.
        sample: index of the sample that was being read; None if the caller gave none.
        detail: expected and actual, without bytes of the payload.
    """

    def __init__(self, code: str, sample: int | None, detail: str) -> None:
        where = "" if sample is None else f"sample {sample}: "
        super().__init__(f"vime_replay [{code}] {where}{detail}")
        self.code, self.sample, self.detail = code, sample, detail

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str]]:
        # Decoding runs in worker processes; the default would pass only the message to the constructor.
        return type(self), (self.code, self.sample, self.detail)


class ReplayPayloadError(ReplayError):
    """A stored payload that is missing, truncated, corrupt, or not what its reference says."""


class ReplayWarning(UserWarning):
    """Rows that can be replayed but look wrong."""
