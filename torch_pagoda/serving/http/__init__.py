"""HTTP below the routes: errors in OpenAI's form, keys, limits of sizes and times, bodies."""
