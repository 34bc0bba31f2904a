//! Words of five letters, the embedded list of them, and the marks of a guess.

use std::{collections::BTreeSet, fmt, sync::LazyLock};

use crate::draws::Draws;

/// Letters of a word.
pub const LETTERS: usize = 5;

/// A word of five letters `a` to `z`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Word(pub(super) [u8; LETTERS]);

impl Word {
    /// A word, in letters of either case; nothing for any other text.
    pub fn read(text: &str) -> Option<Self> {
        let letters: [u8; LETTERS] = text.as_bytes().try_into().ok()?;
        letters
            .iter()
            .all(u8::is_ascii_alphabetic)
            .then(|| Self(letters.map(|letter| letter.to_ascii_lowercase())))
    }

    /// Its letters, each once.
    pub(super) fn distinct(&self) -> BTreeSet<u8> {
        self.0.into_iter().collect()
    }

    /// A mark for each letter when `target` is hidden: `G` in its place, `Y` elsewhere, `X` not there.
    /// Each letter of the target answers for one letter of the guess.
    pub fn marks(self, target: Self) -> [u8; LETTERS] {
        let mut marks = [b'X'; LETTERS];
        let mut free = Vec::with_capacity(LETTERS);
        for ((mark, said), meant) in marks.iter_mut().zip(self.0).zip(target.0) {
            if said == meant {
                *mark = b'G';
            } else {
                free.push(meant);
            }
        }
        for (mark, said) in marks.iter_mut().zip(self.0) {
            let found = free.iter().position(|letter| *mark == b'X' && *letter == said);
            if let Some(index) = found {
                free.swap_remove(index);
                *mark = b'Y';
            }
        }
        marks
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|letter| write!(f, "{}", char::from(*letter)))
    }
}

struct Lists {
    hidden: Vec<Word>,
    guessable: BTreeSet<Word>,
}

static LISTS: LazyLock<Lists> = LazyLock::new(|| {
    let text = include_str!("words.txt");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let (mut hidden, mut guessable, mut only_guessed) = (Vec::new(), BTreeSet::new(), false);
    for line in lines {
        only_guessed |= line.starts_with('-');
        for word in line.split_whitespace().filter_map(Word::read) {
            guessable.insert(word);
            if !only_guessed {
                hidden.push(word);
            }
        }
    }
    // The first words of the list stand for all of it.
    Draws::new("rollcall-wordle-list-v1", 0).shuffle(&mut hidden);
    Lists { hidden, guessable }
});

/// The words that can be hidden, in an order that has nothing to do with the alphabet.
pub(super) fn hidden() -> &'static [Word] {
    &LISTS.hidden
}

/// The words that can be guessed.
pub(super) fn guessable() -> &'static BTreeSet<Word> {
    &LISTS.guessable
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(text: &str) -> Word {
        Word::read(text).expect("a word")
    }

    fn marks(guess: &str, target: &str) -> String {
        String::from_utf8_lossy(&word(guess).marks(word(target))).into_owned()
    }

    /// A letter is G in its place; else Y while the target has more of it than are already answered,
    /// counted anew at every place.
    fn reference(guess: Word, target: Word) -> String {
        let mut marks = String::new();
        for (place, letter) in guess.0.iter().enumerate() {
            let right = |at: usize| guess.0[at] == target.0[at];
            let in_target = target.0.iter().filter(|meant| *meant == letter).count();
            let in_place = (0..5).filter(|at| guess.0[*at] == *letter && right(*at)).count();
            let before = (0..place).filter(|at| guess.0[*at] == *letter && !right(*at)).count();
            marks.push(match right(place) {
                true => 'G',
                false if in_place + before < in_target => 'Y',
                false => 'X',
            });
        }
        marks
    }

    #[test]
    fn letters_that_stand_twice_are_marked_as_often_as_the_word_has_them() {
        for (guess, target, expected) in [
            ("speed", "abide", "XXYXY"),
            ("speed", "erase", "YXYYX"),
            ("speed", "steal", "GXGXX"),
            ("speed", "crepe", "XYGYX"),
            ("allay", "llama", "YGYYX"),
            ("geese", "eerie", "XGYXG"),
            ("crane", "crane", "GGGGG"),
        ] {
            assert_eq!(marks(guess, target), expected, "{guess} for {target}");
        }
    }

    #[test]
    fn marks_are_those_of_a_reference_for_every_guess_of_many_words() {
        let targets: Vec<Word> = hidden().iter().step_by(40).copied().collect();
        for guess in guessable() {
            for target in &targets {
                let marks = guess.marks(*target);
                assert_eq!(
                    String::from_utf8_lossy(&marks),
                    reference(*guess, *target),
                    "{guess} for {target}"
                );
            }
        }
        // Five letters of two kinds: every pair there is.
        let all: Vec<Word> =
            (0u8..32).map(|bits| Word([0, 1, 2, 3, 4].map(|at| b'a' + (bits >> at & 1)))).collect();
        for (guess, target) in all.iter().flat_map(|guess| all.iter().map(move |t| (guess, t))) {
            assert_eq!(String::from_utf8_lossy(&guess.marks(*target)), reference(*guess, *target));
        }
    }

    #[test]
    fn the_list_is_what_its_version_says() {
        assert_eq!((hidden().len(), guessable().len()), (2136, 4627));
        assert!(hidden().iter().all(|word| guessable().contains(word)));
        let distinct: BTreeSet<&Word> = hidden().iter().collect();
        assert_eq!(distinct.len(), hidden().len());
        let digest = protocol::Digest::of(include_bytes!("words.txt")).to_string();
        assert_eq!(
            digest, "ad03fa1959b4f9b4d5557236d1178cf1433d1803acad1dc439c19c277fa0c84d",
            "a changed list needs another version"
        );
    }

    #[test]
    fn only_five_letters_are_a_word() {
        assert_eq!(Word::read("CRane"), Some(word("crane")));
        for text in ["", "cran", "cranes", "cr ne", "crän", "crän€", "12345", "crane "] {
            assert_eq!(Word::read(text), None, "{text:?}");
        }
    }
}
