"""The worker's check: a call that requires approval runs only with one, wherever its message came from."""

from __future__ import annotations

from nekro.app.approvals.seals import ApprovalSeal, digest_of
from nekro.wire.invocation import Invocation
from nekro_agent.errors import NotApprovedError
from storage.access.approvals import Approval
from storage.states import ApprovalState
from storage.transaction import Transaction

__all__ = ["ApprovalCheck"]


class ApprovalCheck:
    """Compares calls with the decisions of people."""

    def __init__(self, seal: ApprovalSeal) -> None:
        self._seal = seal

    async def permits(self, transaction: Transaction, invocation: Invocation) -> bool:
        """Whether an approval for a turn or a chat lets a call pass without a request of its own."""
        granted = await transaction.approvals.grants(
            invocation.chat_key, invocation.method, turn_id=invocation.turn_id
        )
        return any(map(self._seal.fits, granted))

    async def confirm(self, transaction: Transaction, invocation: Invocation) -> None:
        """Return if a call was approved.

        Args:
            invocation: verified; its signature says which process made it, not who permitted it.

        Raises:
            NotApprovedError: it was not approved, or what was approved differs from it.
        """
        own = await transaction.approvals.of_call(invocation.call_id)
        if own is None:
            if not await self.permits(transaction, invocation):
                raise NotApprovedError(
                    f"{invocation.method} requires approval, and call {invocation.call_id} has none"
                )
            return
        if own.state is not ApprovalState.APPROVED:
            raise NotApprovedError(
                f"call {invocation.call_id} of {invocation.method} is not approved: approval {own.id} is "
                f"{own.state.value}"
            )
        if not (self._seal.fits(own) and _is_of(own, invocation)):
            raise NotApprovedError(
                f"call {invocation.call_id} of {invocation.method} is not what approval {own.id} permits"
            )


def _is_of(row: Approval, invocation: Invocation) -> bool:
    return (row.method, row.chat_key, row.digest) == (
        invocation.method,
        invocation.chat_key,
        digest_of(invocation.method, invocation.args),
    )
