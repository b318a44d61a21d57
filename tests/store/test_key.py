"""The model key is what FORMAT.md says: anybody can compute it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import tsdoc.store
from tests.store.synthetic import make_key
from tsdoc.models.config import RopeConfig
from tsdoc.store.key import FORMAT, ModelKey

YARN = RopeConfig(rope_type="yarn", theta=1e6, factor=4.5, original_window=32_768, truncate=False)


def test_the_key_is_the_digest_of_plain_json() -> None:
    text = (
        '{"chunk_size":128,"compute_dtype":"float32","function":"head_soft_vote","index":"exact",'
        f'"kv_dtype":"bfloat16","layout":{FORMAT},"model":"m","n_init":128,"n_local":512,'
        '"rope":{"factor":4.5,"original_window":32768,"rope_type":"yarn","theta":1000000,'
        '"truncate":false},"sets":"one","smoothing":1,"top_k":2048}'
    )
    expected = hashlib.sha256(text.encode()).hexdigest()[:32]
    assert make_key(rope=YARN.fields()).digest == expected


def test_the_order_of_fields_plays_no_part() -> None:
    fields = YARN.fields()
    turned = dict(reversed(fields.items()))
    assert list(turned) != list(fields)
    assert make_key(rope=turned) == make_key(rope=fields)
    assert make_key(rope=turned).digest == make_key(rope=fields).digest
    assert hash(make_key(rope=turned)) == hash(make_key(rope=fields))


def test_the_format_names_every_field() -> None:
    text = (Path(tsdoc.store.__file__).parent / "FORMAT.md").read_text("utf-8")
    section = text.partition("## The model key\n")[2].partition("\n## ")[0]
    for name in (*ModelKey.__dataclass_fields__, *RopeConfig.__dataclass_fields__):
        assert f"`{name}`" in section, name
