//! Texts that many overrides share, each kept once.

use std::{collections::HashMap, sync::Arc};

/// Texts by their numbers, with what was made of each, for as long as one override has it.
#[derive(Clone)]
pub(super) struct Interner<T> {
    /// By themselves: what decisions read of a limit is here, and few lines of the processor's cache hold all of it.
    meanings: Vec<Option<T>>,
    entries: Vec<Option<Interned>>,
    by_text: HashMap<Arc<str>, u32>,
    free: Vec<u32>,
}

#[derive(Clone)]
struct Interned {
    text: Arc<str>,
    uses: u32,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Self { meanings: Vec::new(), entries: Vec::new(), by_text: HashMap::new(), free: Vec::new() }
    }
}

impl<T: Clone> Interner<T> {
    /// The number of a text that is had once more, and `None` for one that nobody has yet.
    pub(super) fn used(&mut self, text: &str) -> Option<u32> {
        let number = *self.by_text.get(text)?;
        self.entries[number as usize].as_mut()?.uses += 1;
        Some(number)
    }

    /// The number of a text that nobody had.
    pub(super) fn add(&mut self, text: &str, meaning: T) -> u32 {
        let text: Arc<str> = text.into();
        let (meaning, word) = (Some(meaning), Some(Interned { text: Arc::clone(&text), uses: 1 }));
        let number = match self.free.pop() {
            Some(number) => {
                self.meanings[number as usize] = meaning;
                self.entries[number as usize] = word;
                number
            }
            None => {
                self.meanings.push(meaning);
                self.entries.push(word);
                (self.entries.len() - 1) as u32
            }
        };
        self.by_text.insert(text, number);
        number
    }

    /// A override that had it has it no more.
    pub(super) fn unused(&mut self, number: u32) {
        let Some(entry) = self.entries.get_mut(number as usize) else {
            return;
        };
        if let Some(word) = entry
            && word.uses > 1
        {
            word.uses -= 1;
            return;
        }
        if let Some(word) = entry.take() {
            self.meanings[number as usize] = None;
            self.by_text.remove(&word.text);
            self.free.push(number);
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_text.is_empty()
    }

    pub(super) fn meaning(&self, number: u32) -> Option<&T> {
        self.meanings.get(number as usize)?.as_ref()
    }

    pub(super) fn text(&self, number: u32) -> Arc<str> {
        let word = self.entries.get(number as usize).and_then(Option::as_ref);
        word.map_or_else(|| "".into(), |word| Arc::clone(&word.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_kept_for_as_long_as_somebody_has_it() {
        let mut words = Interner::default();
        assert_eq!(words.used("a"), None);
        assert_eq!((words.add("a", 1), words.add("b", 2), words.used("a")), (0, 1, Some(0)));
        words.unused(0);
        assert_eq!((words.meaning(0), &*words.text(0)), (Some(&1), "a"));
        words.unused(0);
        assert_eq!((words.used("a"), words.meaning(0), &*words.text(0)), (None, None, ""));
        // Its place is taken by the next.
        assert_eq!((words.add("c", 3), words.used("b")), (0, Some(1)));
        words.unused(7);
    }
}
