"""Made-up names, numbers and sentences, all drawn from a seeded generator."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split("|"))


ADJECTIVES = _words(
    """
amber ancient bitter blazing bold brave bright broken calm careful clever cloudy cold copper
crimson curious dancing daring dusty early eager faint famous fancy fearless fierce floating foggy
forgotten frozen gentle giant gilded glowing golden graceful grand hidden hollow humble icy idle
ivory jolly keen lively lonely lucky mellow mighty misty modest narrow nimble noble patient pearly
plain polite proud purple quick quiet rapid restless rough royal rusty scarlet secret shy silent
silver sleepy slender smooth snowy solemn speckled stormy sturdy sunny swift tender tidy tranquil
velvet violet wandering weary wild winding wise witty wooden young
"""
)
NOUNS = _words(
    """
acorn anchor antler apple arrow badger banner barley beacon beetle bell birch blossom boulder
bridge brook bucket candle canyon castle cedar cherry clover comet compass cottage crane cricket
dagger daisy desert dolphin dragon eagle ember falcon feather fern fiddle forest fountain fox
garden glacier goblet goose granite hammer harbor harp hawk hazel heron hill island jacket jewel
kettle kitten ladder lantern lemon lily lion lizard maple marble meadow mirror moth mountain
needle nettle oak ocean orchard otter owl paddle palace panther parrot pebble pepper pigeon pine
planet plum pond poppy puzzle quill rabbit raven ribbon river robin rocket saddle sail salmon
shadow shell shield sparrow spider spruce statue stone swan sword temple thistle thunder tiger
tower trumpet tulip turtle valley violin walnut whale willow window wolf zephyr
"""
)
_WHO = _phrases(
    """
the gardener | my aunt | a tall clerk | the captain's son | our neighbour | the miller | an old
sailor | the schoolmaster | her cousin | a travelling painter | the postman | two students | the
innkeeper | a quiet surgeon | the librarian | his brother | the whole crew | a young lawyer | the
watchmaker | nobody present
"""
)
_DID = _phrases(
    """
walked slowly | argued about money | waited for the rain to stop | sang an old song | counted the
barrels | wrote a long letter | slept until noon | repaired a fence | looked for a lost glove |
read the newspaper aloud | baked bread | mended the nets | played chess | cleaned the lamps |
spoke of distant towns | planted beans | painted the door green | forgot the appointment |
listened to the wind | drew a map of the coast
"""
)
_WHERE = _phrases(
    """
by the river | in the old mill | near the station | under the pines | at home | behind the chapel
| on the upper deck | in the market square | beside the stove | at the edge of the moor | in a
rented room | along the canal | on the stairs | outside the theatre | in the cellar | at the
crossroads | below the lighthouse | on the back porch
"""
)
_WHEN = _phrases(
    """
in early spring | before supper | on a wet Sunday | at dawn | all winter | after the harvest |
during the long strike | one evening in June | shortly after the war | when the fair was over |
between two storms | late at night | the year the bridge fell | on market day
"""
)
FILLER = (
    "The road is long and the fields are flat. ",
    "A cart goes by, and then another. ",
    "The sun climbs, the dust settles, and nothing else happens. ",
    "Then it all begins again. ",
)
"""What a haystack of repeated filler repeats."""


def make_name(rng: random.Random, taken: set[str]) -> str:
    """Returns a name such as "amber-falcon" that is not in `taken`, and adds it there."""
    for attempt in range(1000):
        parts = [rng.choice(ADJECTIVES), rng.choice(NOUNS)]
        if attempt > 3 or len(taken) > 2000:  # pairs run out
            parts.insert(0, rng.choice(ADJECTIVES))
        name = "-".join(parts)
        if name not in taken:
            taken.add(name)
            return name
    return f"{make_uuid(rng)}"


def make_number(rng: random.Random, num_digits: int) -> str:
    """Returns a number of so many digits, the first not 0."""
    return str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))


def make_uuid(rng: random.Random) -> str:
    """Returns 32 random hex digits in the groups of a UUID."""
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def make_word(rng: random.Random) -> str:
    """Returns a pronounceable word of three to five syllables without a meaning."""
    syllables = (
        rng.choice("bdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(3, 5))
    )
    return "".join(syllables)


def make_sentence(rng: random.Random) -> str:
    """Returns a sentence of prose that says nothing of importance."""
    order = [rng.choice(_WHO), rng.choice(_DID), rng.choice(_WHERE)]
    when = rng.choice(_WHEN)
    text = " ".join([when.capitalize() + ",", *order] if rng.random() < 0.4 else [*order, when])
    return f"{text[0].upper()}{text[1:]}. "
