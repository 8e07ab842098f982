"""Values between sandboxed code and workers: plain data as tagged JSON text.

Format: a value is one JSON text in UTF-8 without whitespace outside of strings. ``null``, ``true``,
``false``, numbers, strings and arrays are None, bool, int or float, str and list; a number with a
point or an exponent is a float, any other number is an int. An object is a dict whose keys are
strings that do not begin with ``$``. Everything else is an object with exactly one key, its tag:

    {"$tuple":[…]}  {"$set":[…]}  {"$frozenset":[…]}      the items
    {"$dict":[key,value,…]}                               a dict with other keys, or with ``$`` keys
    {"$ordered":[key,value,…]}                            OrderedDict; a worker makes a dict of it
    {"$bytes":"…"}  {"$bytearray":"…"}                    base64 with padding
    {"$float":"nan"}                                      also ``inf`` and ``-inf``
    {"$complex":[real,imaginary]}                         two floats
    {"$date":"2024-02-29"}
    {"$datetime":"2024-02-29T09:30:00.000001"}            naive, fold 0; the fraction is optional
    {"$datetime":["2024-02-29T09:30:00",fold,zone]}       fold 0 or 1; zone null or one of the next two
    {"$timezone":[microseconds]}  {"$timezone":[microseconds,name]}   a fixed offset
    {"$zone":"Asia/Tokyo"}                                ZoneInfo
    {"$time":"09:30:00"}  {"$time":["09:30:00",fold,zone]}
    {"$timedelta":[days,seconds,microseconds]}            as ``timedelta`` normalises them
    {"$decimal":"-1.50"}  {"$fraction":[numerator,denominator]}
    {"$uuid":"32 hexadecimal digits"}
    {"$path":"/app/shared/x"}  {"$purepath":"a/b"}        a worker makes a str of it
    {"$pickle":[reason,"base64"]}                         results only, see below

Arguments are ``[[positional,…],{name:value,…}]``. A value that is referenced twice is written twice.

Trust: text from a sandbox is read by ``nekro.wire.parser``, which limits steps, bytes, depth and time
while it runs. It refuses any other form (an unknown tag, a wrong payload, a duplicate key, whitespace,
a fraction that is not in lowest terms) and can build only the types above. ``$pickle`` returns an
instance of a class that has no tag: the whole value is an ordinary pickle, which only the sandbox
loads; ``reason`` names the class for people. The host refuses it.

    tagged.py        writes the text; standard library only, because the sandbox's runner contains it
    parser.py        reads it within a budget; budget.py and constructors.py hold limits and types
    short_texts.py   reads most short texts with C code, with the same result as the parser
    values.py        arguments and results
    returned_*.py    the values that a worker may return, and their form
    decode_pool.py   reads large arguments on a thread, round-robin between chats
"""
