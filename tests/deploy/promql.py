"""An evaluator of the shapes of PromQL that deploy/ uses, over two scrapes: enough to say what an expression finds.

A vector is a dict from labels, a frozenset of pairs, to a value. `rate` and `increase` take the whole time between the
two scrapes, whatever range is written.
"""

import re

TOKEN = re.compile(
    r"""\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<string>"[^"]*")|(?P<range>\[\w+\])|(?P<name>[a-zA-Z_:][\w:]*)"""
    r"""|(?P<mark>=~|!=|!~|==|>=|<=|[-+*/<>(){},=]))"""
)
SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
NAME = "__name__"
AGGREGATES = {"sum": sum, "max": max, "min": min}
ARITHMETIC = {"+": float.__add__, "-": float.__sub__, "*": float.__mul__}
COMPARISONS = {"==": float.__eq__, ">": float.__gt__, "<": float.__lt__, ">=": float.__ge__, "<=": float.__le__}


def scrape(text, **more):
    """The samples of Prometheus text, with the labels that a scraper adds."""
    found = {}
    for name, labels, value in SAMPLE.findall("\n".join(x for x in text.splitlines() if not x.startswith("#"))):
        pairs = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))
        found[frozenset({NAME: name, **pairs, **more}.items())] = float(value)
    return found


def bare(labels):
    return frozenset(pair for pair in labels if pair[0] != NAME)


class Evaluator:
    """Evaluates expressions over the samples of two scrapes, `seconds` apart; `after` are the current ones."""

    def __init__(self, before, after, seconds):
        self.before, self.after, self.seconds = before, after, seconds

    def __call__(self, expression):
        """A vector. Raises ValueError for what it does not know."""
        self.tokens, position = [], 0
        expression = expression.strip()
        while position < len(expression):
            match = TOKEN.match(expression, position)
            if match is None:
                raise ValueError(f"unknown at {expression[position:]!r}")
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        self.place = 0
        value = self.either()
        if self.place != len(self.tokens):
            raise ValueError(f"unknown: {self.tokens[self.place :]}")
        return value if isinstance(value, dict) else {frozenset(): value}

    # One token at a time.

    def peek(self):
        return self.tokens[self.place][1] if self.place < len(self.tokens) else ""

    def take(self, *wanted):
        """The next token, if it is one of `wanted`; "" if it is not."""
        if self.peek() not in wanted:
            return ""
        self.place += 1
        return self.tokens[self.place - 1][1]

    def need(self, wanted):
        if not self.take(wanted):
            raise ValueError(f"{wanted!r} expected, not {self.peek()!r}")

    # Operators, the loosest first.

    def either(self):
        left = self.both()
        while self.take("or"):
            right = self.both()
            left = left | {labels: value for labels, value in right.items() if labels not in left}
        return left

    def both(self):
        left = self.compared()
        while self.take("and"):
            nothing = bool(self.take("on"))
            if nothing:
                self.need("("), self.need(")")
            right = self.compared()
            kept = {bare(labels) for labels in right}
            left = {labels: value for labels, value in left.items() if (right if nothing else bare(labels) in kept)}
        return left

    def compared(self):
        left = self.added()
        while mark := self.take(*COMPARISONS):
            compare, right = COMPARISONS[mark], self.added()
            left = {labels: value for labels, value, other in pairs(left, right) if compare(value, other)}
        return left

    def added(self):
        left = self.multiplied()
        while mark := self.take("+", "-"):
            left = computed(ARITHMETIC[mark], left, self.multiplied())
        return left

    def multiplied(self):
        left = self.one()
        while mark := self.take("*", "/"):
            divide = lambda a, b: a / b if b else float("nan")  # noqa: E731
            left = computed(ARITHMETIC.get(mark, divide), left, self.one())
        return left

    # Operands.

    def one(self):
        kind, text = self.tokens[self.place]
        if self.take("("):
            value = self.either()
            self.need(")")
            return value
        self.place += 1
        if kind == "number":
            return float(text)
        if text in AGGREGATES:
            return self.aggregate(AGGREGATES[text])
        if text in ("rate", "increase", "absent", "vector", "count_over_time"):
            self.need("(")
            value = self.either()
            self.need(")")
            if text == "vector":
                return {frozenset(): value}
            if text == "absent":
                return {} if value else {frozenset(): 1.0}
            scale = {"rate": 1.0 / self.seconds, "increase": 1.0, "count_over_time": 1.0}[text]
            return {bare(labels): grown * scale for labels, grown in value.items()}
        return self.selected(text)

    def aggregate(self, combine):
        names = []
        if self.take("by"):
            names = self.names()
        self.need("(")
        value, groups = self.either(), {}
        self.need(")")
        for labels, one in value.items():
            key = frozenset(pair for pair in labels if pair[0] in names)
            groups.setdefault(key, []).append(one)
        return {key: float(combine(ones)) for key, ones in groups.items()}

    def names(self):
        self.need("(")
        names = []
        while not self.take(")"):
            self.place += 1
            names.append(self.tokens[self.place - 1][1])
            self.take(",")
        return names

    def selected(self, name):
        """The current samples of a selector, or with a range how much each has grown."""
        wanted = [(NAME, "=", name)]
        if self.take("{"):
            while not self.take("}"):
                label, mark, text = (text for _, text in self.tokens[self.place : self.place + 3])
                wanted.append((label, mark, text.strip('"')))
                self.place += 3
                self.take(",")
        chosen = {labels: value for labels, value in self.after.items() if matches(dict(labels), wanted)}
        if self.place < len(self.tokens) and self.tokens[self.place][0] == "range":
            self.place += 1
            return {labels: value - self.before.get(labels, 0.0) for labels, value in chosen.items()}
        return chosen


def matches(labels, wanted):
    tests = {
        "=": lambda given, text: given == text,
        "!=": lambda given, text: given != text,
        "=~": lambda given, text: re.fullmatch(text, given) is not None,
        "!~": lambda given, text: re.fullmatch(text, given) is None,
    }
    return all(tests[mark](labels.get(label, ""), text) for label, mark, text in wanted)


def pairs(left, right):
    """(labels, value, other value) for each element of `left` with one in `right`, a vector or a number."""
    if not isinstance(right, dict):
        return [(labels, value, float(right)) for labels, value in left.items()]
    others = {bare(labels): value for labels, value in right.items()}
    return [(labels, value, others[bare(labels)]) for labels, value in left.items() if bare(labels) in others]


def computed(operation, left, right):
    if not isinstance(left, dict) and not isinstance(right, dict):
        return operation(left, right)
    if not isinstance(left, dict):
        return {bare(labels): operation(left, value) for labels, value in right.items()}
    return {bare(labels): operation(value, other) for labels, value, other in pairs(left, right)}
