//! Tokens and blocks of text, without a tokenizer.

/// Characters per token.
const LETTERS: usize = 4;

/// Makes tokens of four characters each. Their number is about that of real tokenizers for English,
/// and texts with a common prefix have tokens with a common prefix.
pub(super) fn tokens_by_length(text: &str) -> Vec<u32> {
    let letters: Vec<char> = text.chars().collect();
    let token = |piece: &[char]| {
        let word = piece.iter().fold(piece.len() as u64, |word, &letter| mix(word, letter.into()));
        (word >> 32) as u32
    };
    letters.chunks(LETTERS).map(token).collect()
}

/// Returns an id for each block; equal tokens have equal ids.
pub(super) fn block_ids(tokens: &[u32], block_tokens: u32) -> Vec<u64> {
    let id = |block: &[u32]| {
        block.iter().fold(block.len() as u64, |word, &token| mix(word, token.into()))
    };
    tokens.chunks(block_tokens as usize).map(id).collect()
}

/// Mixes two numbers.
fn mix(word: u64, next: u64) -> u64 {
    let mut mixed = (word ^ next).wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_text_prefixes_give_common_tokens() {
        let [short, long] = ["Wie geht es", "Wie geht es Ihnen?"].map(tokens_by_length);
        assert_eq!((short.len(), long.len()), (3, 5));
        assert_eq!(short[..2], long[..2]);
        assert_ne!(short[2], long[2]);
        let [short, long] = [short, long].map(|tokens| block_ids(&tokens, 2));
        assert_eq!((short.len(), short[0] == long[0], short[1] == long[1]), (2, true, false));
    }
}
