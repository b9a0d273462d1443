"""Plain Python values as JSON, exactly and without pickle.

None, bool, str, small ints, most floats, lists and dicts with plain str keys are JSON's own. Everything else is an
object with one key that begins with ``$``:

================  =======================================================================
``$int``          hexadecimal text (``0x..``, ``-0x..``) of an int beyond 2**53
``$float``        16 hex digits, the IEEE bits, of nan, inf and -0.0
``$complex``      ``[real, imaginary]``
``$str``          base64 of the UTF-8 bytes of a str with lone surrogates
``$bytes``        base64; likewise ``$bytearray``
``$tuple``        list of nodes; likewise ``$set``, ``$frozenset``
``$dict``         list of ``[key, value]``; likewise ``$odict``, ``$counter``
``$state_dict``   ``[pairs, metadata]``: an OrderedDict with the ``_metadata`` that modules give it
``$defaultdict``  ``[factory name or null, pairs]``;  ``$deque`` is ``[items, maxlen]``
``$namedtuple``   ``[class name, fields, values]``; likewise ``$dataclass``
``$enum``         ``[class name, member name, value]``
``$object``       ``[type name, state]``, see :mod:`savestream.planners.framework_values`
``$scalar``       ``[dtype name, base64]`` of a numpy scalar; ``$npstr``, ``$npbytes``, ``$dtype``
``$date`` ...     ``$datetime``, ``$time``, ``$timedelta``: lists of numbers
``$range`` ...    ``$slice``, ``$ellipsis``, ``$path``, ``$decimal``, ``$fraction``, ``$uuid``
``$pickle``       base64, only where the caller opted in
================  =======================================================================
"""

from __future__ import annotations

from savestream.planners.value_decoding import decode_value, decode_value_bytes
from savestream.planners.value_encoding import MAXIMUM_DEPTH, MAXIMUM_INT_DIGITS, encode_value, encode_value_bytes

__all__ = [
    "MAXIMUM_DEPTH",
    "MAXIMUM_INT_DIGITS",
    "decode_value",
    "decode_value_bytes",
    "encode_value",
    "encode_value_bytes",
]
