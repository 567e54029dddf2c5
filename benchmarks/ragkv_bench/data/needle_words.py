"""Words that needle keys are made of: an adjective, a hyphen, a noun."""

from __future__ import annotations

_ADJECTIVES = """
agile amiable azure bitter blunt bold bright brittle clever cloudy crimson curly deep dim distant
dry elegant exotic fancy fierce flat fluffy fond fresh glad golden graceful grand green handy
harsh hasty heavy hidden idle inner ivory jagged late lean light little loud lunar marble merry
mild minor muddy narrow neat noisy novel odd pale patient plain polar proud quick rare ripe rough
round royal rural scarlet sharp shy silver simple sleek slim small smooth snowy soft solar solid
sour spare steep stern stiff strong sweet swift tall tame tender thick thin thorny tiny upper vast
violet warm weary wide wild wise young
"""

_NOUNS = """
acorn almond arrow atlas autumn basin basket beetle berry blanket blossom bottle boulder branch
breeze brook button cabin cactus camel canal canoe carpet cedar cherry cliff cloud clover coast
comet cottage crane creek crow dolphin donkey dragon dune eagle ember feather fern field flame
flute forest fountain fox galaxy geyser glacier goose grove gull harvest hedge heron hill island
ivy jacket jungle kernel lagoon lake lily lynx maple meadow mill mirror moss mountain needle oak
oasis orchard otter owl palm panther peach pearl pepper pine planet plum pond poppy prairie rabbit
raven reef ridge river robin salmon shadow shore spider spruce stone stream sunset swan thunder
tiger tower trail tulip turtle valley village violin wagon wave willow window wolf zebra
"""

ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
