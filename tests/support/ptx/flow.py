"""The order in which lanes that parted run their blocks, so that they meet again where the branch ends.

A block comes behind all that lead to it, but for the ways back of loops; a loop is run to its end by all its lanes
before any goes on behind it (a weak topological order, Bourdoncle 1993). How the compiler lays blocks out does not
matter: what is seldom run stands at the end of the text, and leads back to the middle.
"""


def order(successors):
    """All blocks, the first first; successors: of each block."""
    return _ordered(list(range(len(successors))), successors)


def _ordered(nodes, successors):
    found = []
    for component in _components(nodes, successors):
        head, *rest = component
        found += [head, *_ordered(rest, successors)]
    return found


def _components(nodes, successors):
    """The strongly connected components of these nodes in topological order, their entry first (Kosaraju)."""
    inside = set(nodes)
    behind = {node: [each for each in successors[node] if each in inside] for node in nodes}
    before = {node: [] for node in nodes}
    for node, ways in behind.items():
        for each in ways:
            before[each].append(node)
    seen = set()
    finished = [each for node in nodes for each in _finished(node, behind, seen)]
    place = {node: number for number, node in enumerate(reversed(finished))}
    taken = set()
    found = [_finished(node, before, taken) for node in reversed(finished) if node not in taken]
    return [sorted(each, key=place.__getitem__) for each in found if each]


def _finished(start, ways, seen):
    """What is reached from a node and was not seen, in the order in which a depth-first search is done with it."""
    if start in seen:
        return []
    seen.add(start)
    found, pending = [], [(start, iter(ways[start]))]
    while pending:
        node, left = pending[-1]
        following = next((each for each in left if each not in seen), None)
        if following is None:
            found.append(node)
            pending.pop()
        else:
            seen.add(following)
            pending.append((following, iter(ways[following])))
    return found
