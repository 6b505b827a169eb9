"""The options of Spark's readers of files, by format. Spark ignores any other option without a word. Pure.

A test compares them with those of the installed Spark.
"""

from __future__ import annotations

import difflib

COMMON = frozenset({
    "basePath", "ignoreCorruptFiles", "ignoreMissingFiles", "modifiedAfter", "modifiedBefore", "pathGlobFilter",
    "recursiveFileLookup", "timeZone",
})  # fmt: skip
BY_FORMAT = {
    "csv": frozenset({
        "charset", "charToEscapeQuoteEscaping", "codec", "columnNameOfCorruptRecord", "columnPruning", "comment",
        "compression", "dateFormat", "delimiter", "emptyValue", "enableDateTimeParsingFallback", "encoding",
        "enforceSchema", "escape", "escapeQuotes", "extension", "header", "ignoreLeadingWhiteSpace",
        "ignoreTrailingWhiteSpace", "inferSchema", "inputBufferSize", "lineSep", "locale", "maxCharsPerColumn",
        "maxColumns", "mode", "multiLine", "nanValue", "negativeInf", "nullValue", "positiveInf", "preferDate",
        "quote", "quoteAll", "samplingRatio", "sep", "singleVariantColumn", "timeFormat", "timestampFormat",
        "timestampNTZFormat", "timeZone", "unescapedQuoteHandling",
    }),
    "json": frozenset({
        "allowBackslashEscapingAnyCharacter", "allowComments", "allowNonNumericNumbers", "allowNumericLeadingZeros",
        "allowSingleQuotes", "allowUnquotedControlChars", "allowUnquotedFieldNames", "charset",
        "columnNameOfCorruptRecord", "compression", "dateFormat", "dropFieldIfAllNull",
        "enableDateTimeParsingFallback", "encoding", "explodeEmbeddedArray", "ignoreNullFields", "inferTimestamp",
        "lineSep", "locale", "mode", "multiLine", "prefersDecimal", "pretty", "primitivesAsString", "samplingRatio",
        "singleVariantColumn", "sortKeys", "timeFormat", "timestampFormat", "timestampNTZFormat", "timeZone",
        "useUnsafeRow", "writeNonAsciiCharacterAsCodePoint",
    }),
    "orc": frozenset({
        "compression", "mergeSchema",
    }),
    "parquet": frozenset({
        "compression", "datetimeRebaseMode", "int96RebaseMode", "mergeSchema",
    }),
}  # fmt: skip


def refuse_option(format: str, name: str) -> str | None:
    """Why a reader of this format has no option of this name; None if it has, or if its options are not known.

    A name with a dot is a setting of Hadoop or of a library. Spark compares names without regard to case.
    """
    known = BY_FORMAT.get(format)
    if known is None or "." in name:
        return None
    names = {one.lower(): one for one in COMMON | known}
    if name.lower() in names:
        return None
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"no option of the format {format}" + (f" (did you mean {names[near[0]]}?)" if near else "")
