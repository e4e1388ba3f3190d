"""The words that the corpus is made of."""

# ruff: noqa: SIM905  words in a row read better than forty-five quoted strings

from __future__ import annotations


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split(": ") for pair in text.split(", "))


NAMES = (
    "Ana Ben Carla Dan Emma Farid Grace Hugo Iris Jonas Kira Liam Mona Nils Olga Pablo Quinn Rosa Sam Tara Uma Vera "
    "Will Xena Yusuf Zoe"
).split()
ITEMS = (
    "apples pencils books marbles stickers coins cookies stamps shells cards balloons tickets bottles flowers eggs "
    "candles buttons oranges"
).split()
PLACES = "market school library park farm museum bakery harbor station garden".split()
WORDS = (
    "river stone cloud paper lemon tiger violin window garden rocket silver candle bridge forest island pepper button "
    "camera desert engine feather guitar hammer insect jacket kettle ladder mirror needle orange pencil rabbit saddle "
    "turtle umbrella valley walnut yellow zipper anchor basket carpet dragon eagle flower"
).split()
CAPITALS = _pairs(
    "France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, Portugal: Lisbon, Austria: Vienna, Greece: Athens, "
    "Poland: Warsaw, Norway: Oslo, Sweden: Stockholm, Finland: Helsinki, Denmark: Copenhagen, Japan: Tokyo, China: "
    "Beijing, India: New Delhi, Egypt: Cairo, Kenya: Nairobi, Canada: Ottawa, Mexico: Mexico City, Brazil: "
    "Brasilia, Peru: Lima, Chile: Santiago, Cuba: Havana, Turkey: Ankara, Ireland: Dublin, Hungary: Budapest, "
    "Romania: Bucharest, Thailand: Bangkok, Vietnam: Hanoi, Australia: Canberra"
)
OPPOSITES = _pairs(
    "hot: cold, big: small, fast: slow, light: dark, up: down, old: new, wet: dry, happy: sad, early: late, open: "
    "closed, full: empty, hard: soft, high: low, rich: poor, strong: weak, near: far, loud: quiet"
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
OPERATIONS = {"add": ("+", "sum"), "subtract": ("-", "difference"), "multiply": ("*", "product")}
SYSTEM_PROMPTS = ["You are a helpful assistant.", "Answer briefly.", "You are a careful math tutor."]
