"""Awaitable calls for asyncio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Then = Callable[[Any, BaseException | None], None]


async def awaited(start: Callable[[Then], object]) -> Any:
    """Starts a call that reports its end from another thread, and awaits it."""
    # Imported late, because it takes longer than all other imports here.
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def then(value: Any, error: BaseException | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    start(then)
    return await future
