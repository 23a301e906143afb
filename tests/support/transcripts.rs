//! Transcripts of the documentation: commands with their output, in which `…` stands for text that differs between runs.

/// Returns `true` if the line matches the line of the document, in which `…` stands for any text.
pub(crate) fn matches(line: &str, expected: &str) -> bool {
    let mut remaining = line;
    let mut parts = expected.split('…');
    let Some(start) = parts.next().and_then(|first| remaining.strip_prefix(first)) else {
        return false;
    };
    remaining = start;
    let parts: Vec<_> = parts.collect();
    for (index, part) in parts.iter().enumerate() {
        if index + 1 == parts.len() {
            return remaining.ends_with(part);
        }
        let Some(at) = remaining.find(part) else {
            return false;
        };
        remaining = &remaining[at + part.len()..];
    }
    remaining.is_empty()
}

/// Returns `true` if the output has the lines of the document.
pub(crate) fn is_documented(printed: &str, expected: &[&str]) -> bool {
    let printed: Vec<&str> = printed.lines().collect();
    printed.len() == expected.len()
        && printed.iter().zip(expected).all(|(line, expected)| matches(line.trim_end(), expected))
}

/// Replaces the parts of a line that differ between runs by `…`.
pub(crate) fn with_placeholders(line: &str) -> String {
    for start in ["  reset in ", "  retry after ", ", reset in "] {
        if let Some((before, _)) = line.split_once(start) {
            return format!("{before}{start}…");
        }
    }
    if let Some((hits, _)) = line.split_once(" hits in ") {
        return format!("{hits} hits in … s");
    }
    let words: Vec<String> = line
        .split(' ')
        .map(|word| {
            let is_digest = word.len() >= 64 && word.chars().take(64).all(|letter| letter.is_ascii_hexdigit());
            if is_digest { format!("…{}", &word[64..]) } else { without_times(word) }
        })
        .collect();
    words.join(" ")
}

/// Replaces times such as `2026-11-22T04:00:00Z` by `…`.
fn without_times(word: &str) -> String {
    const FORMAT: &[u8] = b"0000-00-00T00:00:00Z";
    let is_time = |bytes: &[u8]| {
        let matches = |(byte, format): (&u8, &u8)| if *format == b'0' { byte.is_ascii_digit() } else { byte == format };
        bytes.len() == FORMAT.len() && bytes.iter().zip(FORMAT).all(matches)
    };
    match (0..word.len()).find(|at| word.as_bytes().get(*at..at + FORMAT.len()).is_some_and(is_time)) {
        Some(at) => format!("{}…{}", &word[..at], without_times(&word[at + FORMAT.len()..])),
        None => word.to_owned(),
    }
}
