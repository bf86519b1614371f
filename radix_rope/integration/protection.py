"""Keeps exact requests away from approximate KV, and lets their KV replace it.

Owns two steps of the cache: where a match must stop, and what happens to
approximate nodes whose tokens a request has computed exactly. Nothing here
may look at another request's options: an approximate node is one whatever put
it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_rope.integration.request import EXACT, RequestState

if TYPE_CHECKING:
    from radix_rope.integration.cache import RadixRopeCache


def exact_part(cache: RadixRopeCache, result: Any) -> Any:
    """Cut a MatchResult before its first approximate node."""
    first = None
    node = result.last_device_node
    while node is not cache.root_node:
        if not node.segment.provenance.exact:
            first = node
        node = node.parent
    if first is None:
        return result
    last = first.parent
    return result._replace(
        device_prefix_len=cache.path_tokens(last),
        last_device_node=last,
        last_host_node=last,
        best_match_node=last,
    )


def heal(
    cache: RadixRopeCache, req: Any, state: RequestState, token_ids: Any, key_limit: int | None
) -> int | None:
    """Put the exact KV that `req` computed where approximate nodes hold the same tokens.

    A node that nobody uses gets the request's slots, and its own are freed. From the first one
    that is in use on, a request that must stay exact keeps its copy to itself.

    Args:
        cache: the tree.
        req: SGLang's request, about to be inserted.
        state: its provenance.
        token_ids: what is inserted, from position 0 on.
        key_limit: SGLang's limit of the inserted key, in tokens; None for no limit.

    Returns:
        The limit that SGLang's insert must keep to.
    """
    key = RadixKey(token_ids, req.extra_key, is_bigram=cache.is_eagle, cache_salt=req.cache_salt)
    key = key.page_aligned(cache.page_size)
    if key_limit is not None:
        key = key[:key_limit]
    path = _path(cache, key)
    protected = int(req.kv.cache_protected_len)
    if all(node.segment.provenance.exact for node in path if node.segment.end > protected):
        return key_limit
    exact_end = len(token_ids) if state.exact_until is None else state.exact_until
    row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    for node in path:
        begin, end = node.segment.start, node.segment.end
        if end <= protected:
            continue
        if end > exact_end:
            break
        assert begin == protected, "the tree's part of a row ends inside a node"
        own = row[begin:end]
        if node.segment.provenance.exact:
            # A duplicate, as SGLang's own insert treats it.
            cache.token_to_kv_pool_allocator.free_segment(own.clone(), start_pos=begin)
            row[begin:end] = node.value.to(row.dtype)
        elif node.lock_ref > 0:
            if not cache.options_of(req).shifted:
                key_limit = begin
            break
        else:
            _replace(cache, node, own)
        protected = end
    req.kv.cache_protected_len = protected
    return key_limit


def _replace(cache: RadixRopeCache, node: Any, own: Any) -> None:
    assert cache.content is not None
    approximate = node.value
    node.value = own.to(dtype=approximate.dtype, copy=True)
    cache.token_to_kv_pool_allocator.free_segment(approximate, start_pos=0)
    cache.content.set_provenance(node.segment, EXACT)
    cache.healed_tokens += len(approximate)


def _path(cache: RadixRopeCache, key: RadixKey) -> list[Any]:
    """The nodes that hold `key`, in order; a last one that holds more is split."""
    node, rest, path = cache.root_node, key, []
    while len(rest):
        child = node.children.get(rest.child_key(cache.page_size))
        if child is None:
            break
        shared = child.key.match(rest, page_size=cache.page_size)
        if shared < len(child.key):
            path.append(cache._split_node(child.key, child, shared))
            break
        path.append(child)
        node, rest = child, rest[shared:]
    return path
