"""What an approval is bound to: the method, the arguments, and the signature of the decision."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import TYPE_CHECKING

from nekro.wire import plain_json
from nekro.wire.seals import APPROVAL, Seal
from storage.states import ApprovalScope

if TYPE_CHECKING:
    from pydantic import SecretStr

    from storage.access.approvals import Approval, NewApproval

__all__ = ["ApprovalSeal", "digest_of"]


def digest_of(method: str, arguments: str) -> str:
    """Return the SHA-256 of a call, in hexadecimal.

    Args:
        arguments: tagged text.
    """
    # JSON is unambiguous: no two pairs have the same encoding.
    return hashlib.sha256(plain_json.dump([method, arguments])).hexdigest()


class ApprovalSeal:
    """Signs approvals, so that a row that was changed in the database permits nothing."""

    def __init__(self, key: SecretStr) -> None:
        self._seal = Seal(key, purpose=APPROVAL)

    def sign(
        self,
        asked: NewApproval,
        *,
        digest: str,
        scope: ApprovalScope,
        grant_until: datetime | None,
        decided_by: str,
    ) -> str:
        """Return the signature of an approval."""
        return self._seal.sign(_fields(asked, digest, scope, grant_until, decided_by))

    def fits(self, row: Approval) -> bool:
        """Whether a row is an approval as it was signed."""
        if row.scope is None or row.decided_by is None:
            return False
        fields = _fields(row, row.digest, row.scope, row.grant_until, row.decided_by)
        return self._seal.fits(fields, row.seal)


def _fields(
    row: NewApproval, digest: str, scope: ApprovalScope, grant_until: datetime | None, decided_by: str
) -> list[str]:
    until = "" if grant_until is None else grant_until.isoformat()
    turn = row.root_turn_id or ""
    return [row.id, row.call_id, row.chat_key, turn, row.method, digest, scope.value, until, decided_by]
